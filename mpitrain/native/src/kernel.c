/* The operation `MpitrainExchange`: the gradients of one bucket become their mean over the samples of all ranks.
 *
 * Inputs: this rank's samples, a scalar double, and the gradients. Outputs: their means. */
#include "native.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MESSAGE_BYTES 4000
#define MOST_DIMENSIONS 254
#define EXACT 0x1p53 /* whole numbers up to this add up without rounding */

static struct tensorflow tf;

/* One call of the kernel. */
struct call {
    const struct bucket *bucket;
    struct session *session;
    void *context, *status;
    double samples;
    const void **gradients;
    void **means;
    int in_place; /* the mean of the only gradient takes its memory */
};

EXPORTED int mpitrain_setup(const struct tensorflow *functions, int64_t functions_bytes, const struct mpi *of_mpi,
                   int64_t of_mpi_bytes, int64_t session_bytes, int64_t update_bytes, int64_t bucket_bytes) {
    if (functions_bytes != sizeof tf || of_mpi_bytes != sizeof mpi || session_bytes != sizeof(struct session) ||
        update_bytes != sizeof(struct update) || bucket_bytes != sizeof(struct bucket))
        return 0;
    tf = *functions;
    mpi = *of_mpi;
    return 1;
}

EXPORTED void *mpitrain_create(void *construction) {
    void *status = tf.new_status();
    int64_t *address = malloc(sizeof *address);
    if (address)
        tf.get_attribute(construction, "bucket", address, status);
    tf.delete_status(status);
    return address;
}

EXPORTED void mpitrain_delete(void *kernel) {
    free(kernel);
}

static void fail(struct call *call, int code, const char *message) {
    tf.set_status(call->status, code, message);
    tf.fail(call->context, call->status);
}

/* Python does it, or tells of it. Returns whether the step goes on. */
static int by_python(struct call *call, int why, int64_t detail, const void *mean) {
    char message[MESSAGE_BYTES] = "";
    if (!call->session->python(call->bucket, why, detail, call->gradients, call->means, call->samples, mean, message,
                               sizeof message))
        return 1;
    message[sizeof message - 1] = 0;
    fail(call, TF_UNKNOWN, message);
    return 0;
}

/* The memory of input `index`, if it is of this dtype and size; its shape. */
static const void *input(struct call *call, int index, int type, size_t bytes, int64_t *dimensions, int *rank) {
    void *tensor = NULL;
    tf.get_input(call->context, index, &tensor, call->status);
    if (tf.get_code(call->status) || !tensor) {
        tf.fail(call->context, call->status);
        return NULL;
    }
    static const double nothing; /* TensorFlow has no memory for a tensor without elements */
    const void *data = tf.data(tensor) ? tf.data(tensor) : &nothing;
    *rank = tf.rank(tensor);
    int fits = tf.type(tensor) == type && tf.bytes(tensor) == bytes && *rank <= MOST_DIMENSIONS;
    for (int i = 0; fits && i < *rank; i++)
        dimensions[i] = tf.dimension(tensor, i);
    tf.delete_tensor(tensor);
    if (!fits)
        fail(call, TF_INVALID_ARGUMENT, "a gradient has another size or dtype than was planned");
    return fits ? data : NULL;
}

/* The memory of output `index`. With `forward` it is that of the input, where nothing else holds that. */
static void *output(struct call *call, int index, int type, size_t bytes, const int64_t *dimensions, int rank,
                    int forward) {
    int candidate = index + 1, forwarded = -1;
    void *tensor = forward ? tf.forward_or_allocate(call->context, &candidate, 1, index, dimensions, rank, &forwarded,
                                                    call->status)
                           : tf.allocate(call->context, index, type, dimensions, rank, bytes, call->status);
    if (tf.get_code(call->status) || !tensor) {
        tf.fail(call->context, call->status);
        return NULL;
    }
    void *data = tf.data(tensor);
    tf.delete_tensor(tensor);
    static double nothing;
    return data ? data : &nothing;
}

/* Finds inputs and outputs. Returns whether all is as planned. */
static int open_tensors(struct call *call) {
    const struct bucket *bucket = call->bucket;
    struct session *session = call->session;
    int64_t dimensions[MOST_DIMENSIONS];
    int rank;
    if (tf.inputs(call->context) != bucket->members + 1) {
        fail(call, TF_INVALID_ARGUMENT, "there are more or fewer gradients than was planned");
        return 0;
    }
    const double *samples = input(call, 0, FLOAT64, sizeof *samples, dimensions, &rank);
    if (!samples)
        return 0;
    call->samples = *samples;
    int64_t number = (int64_t)session->statistics[COUNT] + (bucket->index == 0);
    for (int64_t i = 0; i < bucket->members; i++) {
        int type = (int)bucket->types[i];
        size_t bytes = (size_t)(bucket->sizes[i] * item_bytes(type));
        call->gradients[i] = input(call, (int)i + 1, type, bytes, dimensions, &rank);
        if (!call->gradients[i])
            return 0;
        /* Of what is summed in place, the part that is looked at must be kept: who has a value that is not finite? */
        int is_whole = session->looks && number % session->whole_every == 0;
        int forward = (int64_t)bytes > session->looked_at_bytes && !is_whole;
        call->means[i] = output(call, (int)i, type, bytes, dimensions, rank, forward);
        if (!call->means[i])
            return 0;
    }
    call->in_place = bucket->members == 1 && call->means[0] == call->gradients[0];
    return 1;
}

/* Weights so that the sum over ranks is the mean over samples, or the sum (`weights_of` in `reduction/reducer.py`).
 * Returns whether they are exact. */
static int weigh(struct session *session, const struct update *update, double *total) {
    const double *samples = session->all + 1;
    int64_t step = session->header_bytes / 8;
    int are_equal = 1, are_whole = 1;
    *total = 0;
    for (int64_t rank = 0; rank < session->size; rank++) {
        double one = samples[rank * step];
        are_equal &= one == samples[0];
        are_whole &= one >= 0 && one <= EXACT / (double)session->size && one == floor(one);
        *total += one;
    }
    double own = samples[session->rank * step];
    session->after = 1.0;
    if (update->added_up) {
        session->before = own > 0 ? -1.0 : 0.0;
        return 1;
    }
    if (samples[0] > 0 && are_equal) {
        session->before = -1.0;
        session->after = 1.0 / (double)session->size;
        return 1;
    }
    session->before = *total > 0 ? own / *total : 0.0;
    return are_whole;
}

/* The header of an update. Returns 1 to go on here, 2 if Python has to with these headers, 0 after an error. */
static int begin(struct call *call) {
    struct session *session = call->session;
    const struct update *update = call->bucket->update;
    double start = now(), total;
    memcpy(session->mine, &update->signature, 8);
    session->mine[1] = call->samples;
    int error = gather_headers(session);
    if (error)
        return by_python(call, FAILED, error, NULL) * 0;
    double waited = now() - start;
    *session->waiting += waited;
    int64_t step = session->header_bytes / 8;
    for (int64_t rank = 0; rank < session->size; rank++)
        if (memcmp(session->all + rank * step, &update->signature, 8))
            return 2;
    if (!weigh(session, update, &total))
        return 2;
    memcpy(session->seen, session->all, (size_t)(session->header_bytes * session->size));
    session->fresh = 1;
    session->statistics[COUNT] += 1;
    session->statistics[WAITING] = *session->waiting;
    session->statistics[SAMPLES] += total;
    session->under_way = update;
    session->next = 0;
    return 1;
}

/* The first elements of a bucket that are looked at for values that are not finite. */
static int64_t looked_at(const struct call *call) {
    const struct session *session = call->session;
    int64_t item = item_bytes(call->bucket->type), number = (int64_t)session->statistics[COUNT];
    int64_t most = session->looked_at_bytes / item;
    return call->bucket->size > most && number % session->whole_every ? most : call->bucket->size;
}

static int all_finite(const struct call *call, const void *mean) {
    const struct bucket *bucket = call->bucket;
    int64_t end = looked_at(call), item = item_bytes(bucket->type);
    for (int64_t i = 0; i < bucket->members && bucket->offsets[i] < end; i++) {
        int64_t left = end - bucket->offsets[i];
        int64_t size = bucket->sizes[i] < left ? bucket->sizes[i] : left;
        if (!is_finite((const char *)mean + bucket->offsets[i] * item, bucket->type, size))
            return 0;
    }
    return 1;
}

/* The mean of one bucket. Returns whether the step goes on. */
static int reduce(struct call *call) {
    const struct bucket *bucket = call->bucket;
    struct session *session = call->session;
    int64_t item = item_bytes(bucket->type), kept = 0;
    int is_direct = bucket->members == 1 && bucket->types[0] == bucket->type;
    char *target = is_direct ? call->means[0] : scratch(session, FLAT, bucket->size * item);
    const void *source = target;
    const void *own = call->gradients[0];
    if (call->in_place && session->looks) {
        kept = looked_at(call);
        void *memory = scratch(session, KEPT, kept * item);
        own = memory ? memcpy(memory, own, (size_t)(kept * item)) : NULL;
    }
    if (!target || !own) {
        fail(call, TF_RESOURCE_EXHAUSTED, "no memory for the exchange of gradients");
        return 0;
    }
    if (session->before == 0)
        memset(target, 0, (size_t)(bucket->size * item));
    else if (is_direct && session->before < 0)
        source = call->gradients[0];
    else
        for (int64_t i = 0; i < bucket->members; i++)
            to_wide(target + bucket->offsets[i] * item, bucket->type, call->gradients[i], bucket->types[i],
                    bucket->sizes[i], session->before);
    int error = sum(session, source, target, bucket->type, bucket->size, session->after);
    if (error < 0) {
        fail(call, TF_RESOURCE_EXHAUSTED, "no memory for the exchange of gradients");
        return 0;
    }
    if (error)
        return by_python(call, FAILED, error, NULL) * 0;
    if (session->looks && !all_finite(call, target)) {
        call->gradients[0] = own;
        if (!by_python(call, NOT_FINITE, kept, target))
            return 0;
    }
    for (int64_t i = 0; !is_direct && i < bucket->members; i++)
        from_wide(call->means[i], bucket->types[i], target + bucket->offsets[i] * item, bucket->type,
                  bucket->sizes[i]);
    return 1;
}

/* Whether Python has nothing to do with this bucket, as far as is known before its turn. */
static int is_usual(const struct bucket *bucket) {
    const struct update *update = bucket->update;
    const struct session *session = update->session;
    if (session->turn[OTHERS_CAME] || session->turn[OBSERVED])
        return 0;
    if (bucket->index > 0)
        return session->under_way == update && session->next == bucket->index;
    int is_known = update->is_small || session->how[CHOSEN]; /* how it is summed; else ranks measure it together */
    return update->ready && is_known && !session->pending && !session->under_way;
}

/* Bucket by bucket without Python, where that has nothing to do with it. */
static void exchange(struct call *call) {
    const struct bucket *bucket = call->bucket;
    const struct update *update = bucket->update;
    struct session *session = call->session;
    if (!is_usual(bucket) || !mpitrain_take_turn(session->turn)) {
        by_python(call, EXCHANGE, 0, NULL);
        return;
    }
    session->activity[INSIDE] = bucket->id;
    int goes_on = bucket->index == 0 ? begin(call) : 1;
    if (goes_on == 1) {
        double start = now();
        goes_on = reduce(call);
        session->statistics[EXCHANGING] += now() - start;
        session->next = bucket->index + 1;
        if (!goes_on || session->next == update->buckets)
            session->under_way = NULL;
        if (session->next == update->buckets)
            session->activity[UPDATES] = (int64_t)session->statistics[COUNT];
    }
    session->activity[INSIDE] = 0;
    if (goes_on == 2)
        by_python(call, GATHERED, 0, NULL);
    int others_came = (int)session->turn[OTHERS_CAME];
    mpitrain_give_turn(session->turn);
    if (goes_on == 1 && others_came)
        by_python(call, CONTENDED, 0, NULL);
}

EXPORTED void mpitrain_compute(void *kernel, void *context) {
    const struct bucket *bucket = (const struct bucket *)(uintptr_t) * (int64_t *)kernel;
    struct call call = {.bucket = bucket, .session = bucket->update->session, .context = context};
    call.status = tf.new_status();
    call.gradients = calloc((size_t)bucket->members * 2, sizeof(void *));
    call.means = (void **)call.gradients + bucket->members;
    if (!call.gradients)
        fail(&call, TF_RESOURCE_EXHAUSTED, "no memory for the exchange of gradients");
    else if (open_tensors(&call))
        exchange(&call);
    free(call.gradients);
    tf.delete_status(call.status);
}
