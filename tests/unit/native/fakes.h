/* What the driver stands in for: TensorFlow's C API, MPI between ranks that are threads, and Python. */
#ifndef FAKES_H
#define FAKES_H

#include "native.h"

#include <stdio.h>
#include <stdlib.h>

#define MOST_RANKS 4
#define MOST_MEMBERS 6
#define PROCESS 4711
#define LARGEST 512     /* bytes of one call of MPI */
#define MPI_BROKEN 99 /* another rank has failed */
#define PYTHON_FAILED 9 /* a TF_Code */
#define MPI_FAILED 17 /* as `fail_call` asked for */

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, "\n");                                                                                     \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

struct tensor {
    int type, rank;
    int64_t dimensions[4];
    size_t bytes;
    void *data; /* NULL where there are none */
};

/* One call of the operation. */
struct context {
    int count; /* of inputs */
    struct tensor inputs[MOST_MEMBERS + 2], outputs[MOST_MEMBERS + 2];
    int forwards; /* nothing else holds the inputs */
    int failed;   /* TF_Code */
    char message[5000];
    int handles; /* not deleted yet */
};

/* What this rank's thread does and has seen. */
struct rank {
    int number, size;
    struct context *context;
    int64_t fail_call, fail_memory, fail_tensor; /* the call that fails, from 1; 0: none */
    int64_t calls;                               /* of MPI */
    int asked;                                   /* why Python was called, -1: not */
    int64_t detail;
    int refuses;                /* Python fails */
    int other_process;          /* has made the graph */
    const void *own, *mean;     /* what Python was shown */
    float kept[64];             /* the first of the former */
    void (*before_turn)(void);  /* called when the turn is about to be taken */
};

extern _Thread_local struct rank me;
extern const struct tensorflow fake_tensorflow;
extern const struct mpi fake_mpi;
extern const struct tensorflow broken_attribute;
extern char in_place;

int64_t item_of(int64_t type);
void *own_memory(size_t bytes); /* of the driver: zeros, and never none */
void meet(void);                    /* all ranks */
void break_messages(void);          /* as if a rank had died */
void start_messages(int size);      /* before threads start */
void forget_messages(void);         /* by one rank, while the others wait; checks that nothing is left unless broken */
int messages_are_broken(void);
int called_python(const struct bucket *bucket, int why, int64_t detail, const void *const *gradients,
                  void *const *means, double samples, const void *mean, char *message, int64_t message_bytes);
void make_tensor(struct tensor *tensor, int type, int64_t size);

/* frames.c */
void frames_setup(void);
void frame_compute(const struct bucket *bucket, struct context *context);
void frame_without_bucket(void);
int frame_with_fault(const struct bucket *bucket, struct context *context, int which);

#endif
