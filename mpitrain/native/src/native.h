/* The exchange of a step in machine code: what its parts share.
 *
 * Everything here has a twin in Python, which sends the same messages and gives the same bits, so that each rank may use
 * either at any time: `reduction/reducer.py`, `comm/all_reduce.py`, `comm/ring.py`, `world/agreement.py`. What is not
 * the usual course of an update is left to the twin: `session.python` is called with the bucket.
 *
 * No header of TensorFlow, MPI or Python is needed: `native/library.py` hands the addresses of their functions over. A
 * handle of MPI is a pointer in Open MPI and an int in MPICH. As an argument of 64 bits it serves as both, on x86-64
 * and on aarch64; where MPI writes one, there are 64 bits of zeros before.
 */
#ifndef MPITRAIN_NATIVE_H
#define MPITRAIN_NATIVE_H

#define _POSIX_C_SOURCE 200809L /* clock_gettime, nanosleep */

#include <stddef.h>
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

typedef uint64_t handle; /* of MPI */

/* TF_DataType */
enum { FLOAT32 = 1, FLOAT64 = 2, BFLOAT16 = 14, FLOAT16 = 19 };

/* TF_Code */
enum { TF_INVALID_ARGUMENT = 3, TF_RESOURCE_EXHAUSTED = 8 };

/* Functions of TensorFlow's C API (tensorflow/c/kernels.h, tf_tensor.h, tf_status.h), in this order. */
struct tensorflow {
    void *(*new_status)(void);
    void (*delete_status)(void *status);
    void (*set_status)(void *status, int code, const char *message);
    int (*get_code)(const void *status);
    int (*inputs)(void *context);
    void (*get_input)(void *context, int index, void **tensor, void *status);
    void *(*forward_or_allocate)(void *context, const int *candidates, int candidate_count, int output,
                                 const int64_t *dimensions, int rank, int *forwarded, void *status);
    void *(*allocate)(void *context, int output, int type, const int64_t *dimensions, int rank, size_t bytes,
                      void *status);
    void (*delete_tensor)(void *tensor);
    int (*rank)(const void *tensor);
    int64_t (*dimension)(const void *tensor, int index);
    void *(*data)(const void *tensor);
    size_t (*bytes)(const void *tensor);
    int (*type)(const void *tensor);
    void (*fail)(void *context, void *status);
    void (*get_attribute)(void *construction, const char *name, int64_t *value, void *status);
};

/* Functions of MPI, in this order. */
struct mpi {
    int (*isend)(const void *, int, handle type, int destination, int tag, handle comm, handle *request);
    int (*irecv)(void *, int, handle type, int source, int tag, handle comm, handle *request);
    int (*test)(handle *request, int *done, void *status);
    int (*iallgather)(const void *, int, handle, void *, int, handle, handle comm, handle *request);
    int (*allreduce)(const void *, void *, int, handle type, handle op, handle comm);
    int (*iallreduce)(const void *, void *, int, handle type, handle op, handle comm, handle *request);
};

/* Why Python is called with a bucket: to exchange it; with the headers gathered already; the mean is not finite; another
 * thread exchanged meanwhile; MPI has failed. */
enum { EXCHANGE = 0, GATHERED = 1, NOT_FINITE = 2, CONTENDED = 3, FAILED = 4 };

/* Indices of `session.activity`: see `faults/activity.py`. */
enum { POSITION = 0, MOVED = 1, UPDATES = 2, INSIDE = 3 };

/* Indices of `session.turn`: see `world/agreement.py`. */
enum { TAKEN = 0, OTHERS_CAME = 1, OBSERVED = 2, RANKS = 3 };

/* Indices of `session.how`: see `comm/all_reduce.py`. */
enum { CHOSEN = 0, SEGMENT_BYTES = 1, WINDOW = 2 };

/* Indices of `session.statistics`: see `reduction/statistics.py`. */
enum { COUNT = 0, WAITING = 1, EXCHANGING = 2, SAMPLES = 3 };

struct bucket;

/* Called with the gradients of a bucket, which Python only reads, and the memory for their means (the same where the sum
 * was taken in place). Returns 0, or a TF_Code, and what is wrong stands in `message`. */
typedef int (*python_t)(const struct bucket *bucket, int why, int64_t detail, const void *const *gradients,
                        void *const *means, double samples, const void *mean, char *message, int64_t message_bytes);

/* One communicator and what is exchanged there. Python writes all but what is under `own`. */
struct session {
    handle comm, byte, float32, float64, sum;
    void *in_place;
    int64_t rank, size;
    int64_t ranks; /* of which time: others once some were lost, see `turn` */
    int64_t crowded;    /* ranks share cores */
    int64_t looks;      /* for values that are not finite */
    int64_t pairs;      /* two ranks swap what is small */
    int64_t survives;   /* the loss of ranks: memory that is not the session's own may be gone before messages are */
    int64_t small_bytes, largest_bytes, looked_at_bytes, whole_every;
    int64_t header_bytes; /* of one rank: the call, samples, request, reports */
    double *mine, *all, *seen; /* own header, all headers, those of the latest update */
    double *waiting; /* seconds, until the slowest rank had come */
    double *statistics;
    int64_t *activity, *turn;
    const int64_t *how; /* large buffers are summed; SEGMENT_BYTES is 0 where MPI does it */
    python_t python;
    int64_t pending; /* the headers of the next update were received already, by Python */
    /* own */
    int64_t fresh; /* `seen` was written since Python looked */
    const struct update *under_way; /* an update of which more buckets are to come */
    int64_t next;
    double before, after; /* weights; before < 0: own gradients count as they are */
    uint8_t *scratch[3]; /* see `scratch_t` */
    int64_t scratch_bytes[3];
    int64_t failed; /* MPI has */
};

struct update {
    struct session *session;
    int64_t signature;
    int64_t added_up;
    int64_t buckets;
    int64_t is_small; /* each bucket is */
    int64_t counts;   /* an update of variables, and no other collective */
    int64_t ready; /* Python has made such an update and has nothing more to do in those to come */
};

struct bucket {
    struct update *update;
    int64_t index, id; /* place in the update; name for the watchdog */
    int64_t type, size, members; /* FLOAT32 or FLOAT64 as it travels; elements with the gaps between members */
    const int64_t *offsets, *sizes, *types; /* of each member, elements and TF_DataType */
};

typedef enum { FLAT = 0, ARRIVED = 1, KEPT = 2 } scratch_t;

/* One call with a bucket. */
struct call {
    const struct bucket *bucket;
    struct session *session;
    double samples;
    const void **gradients;
    void **means;
    int in_place; /* the mean of the only gradient takes its memory, in the dtype of the sum */
    void (*fail)(struct call *call, int code, const char *message); /* the step fails; called once at most */
};

/* exchange.c */
void exchange(struct call *call);

/* numbers.c */
void to_wide(void *target, int64_t target_type, const void *source, int64_t source_type, int64_t size, double factor);
void from_wide(void *target, int64_t target_type, const void *source, int64_t source_type, int64_t size);
void add(void *target, const void *first, const void *second, int64_t type, int64_t size, double factor);
void scale(void *target, int64_t type, int64_t size, double factor);
int is_finite(const void *array, int64_t type, int64_t size);

/* messages.c */
extern struct mpi mpi;
int64_t item_bytes(int64_t type);
double now(void);
void *scratch(struct session *session, scratch_t which, int64_t bytes);
int gather_headers(struct session *session);
int sum(struct session *session, const void *source, void *target, int64_t type, int64_t size, double factor);

/* kernel.c */
extern int64_t own_process; /* a number that no other process has: a graph of another one has addresses of that one */

/* turn.c */
EXPORTED int mpitrain_take_turn(int64_t *turn);
EXPORTED void mpitrain_give_turn(int64_t *turn);

#endif
