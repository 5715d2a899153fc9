/* The operation `MpitrainExchange`: the gradients of one bucket become their mean over the samples of all ranks.
 *
 * Inputs: this rank's samples, a scalar double, and the gradients. Outputs: their means. */
#include "native.h"

#include <stdlib.h>

#define MOST_DIMENSIONS 254

static struct tensorflow tf;
int64_t own_process;

/* One call of the kernel. */
struct kernel_call {
    struct call call; /* first, so that a pointer to it is one to the whole */
    void *context, *status;
};

EXPORTED int mpitrain_setup(const struct tensorflow *functions, int64_t functions_bytes, const struct mpi *of_mpi,
                   int64_t of_mpi_bytes, int64_t session_bytes, int64_t update_bytes, int64_t bucket_bytes,
                   int64_t process) {
    if (functions_bytes != sizeof tf || of_mpi_bytes != sizeof mpi || session_bytes != sizeof(struct session) ||
        update_bytes != sizeof(struct update) || bucket_bytes != sizeof(struct bucket))
        return 0;
    tf = *functions;
    mpi = *of_mpi;
    own_process = process;
    return 1;
}

/* NULL where there is no memory, or no bucket of this process, which `mpitrain_compute` tells. */
EXPORTED void *mpitrain_create(void *construction) {
    void *status = tf.new_status();
    int64_t *address = malloc(sizeof *address);
    int64_t process = 0;
    if (address)
        tf.get_attribute(construction, "bucket", address, status);
    if (address && !tf.get_code(status))
        tf.get_attribute(construction, "process", &process, status);
    if (address && (tf.get_code(status) || process != own_process)) {
        free(address);
        address = NULL;
    }
    tf.delete_status(status);
    return address;
}

EXPORTED void mpitrain_delete(void *kernel) {
    free(kernel);
}

static void fail(struct call *call, int code, const char *message) {
    struct kernel_call *kernel = (struct kernel_call *)call;
    tf.set_status(kernel->status, code, message);
    tf.fail(kernel->context, kernel->status);
}

/* TensorFlow has not given a tensor, and may have said why. */
static void fail_without(struct kernel_call *call) {
    if (tf.get_code(call->status))
        tf.fail(call->context, call->status);
    else
        fail(&call->call, TF_RESOURCE_EXHAUSTED, "TensorFlow has no memory for a tensor");
}

/* The memory of input `index`, if it is of this dtype and size; its shape. */
static const void *input(struct kernel_call *call, int index, int type, size_t bytes, int64_t *dimensions, int *rank) {
    void *tensor = NULL;
    tf.get_input(call->context, index, &tensor, call->status);
    if (tf.get_code(call->status) || !tensor) {
        fail_without(call);
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
        fail(&call->call, TF_INVALID_ARGUMENT, "a gradient has another size or dtype than was planned");
    return fits ? data : NULL;
}

/* The memory of output `index`. With `forward` it is that of the input, where nothing else holds that. */
static void *output(struct kernel_call *call, int index, int type, size_t bytes, const int64_t *dimensions, int rank,
                    int forward) {
    int candidate = index + 1, forwarded = -1;
    void *tensor = forward ? tf.forward_or_allocate(call->context, &candidate, 1, index, dimensions, rank, &forwarded,
                                                    call->status)
                           : tf.allocate(call->context, index, type, dimensions, rank, bytes, call->status);
    if (tf.get_code(call->status) || !tensor) {
        fail_without(call);
        return NULL;
    }
    void *data = tf.data(tensor);
    tf.delete_tensor(tensor);
    static double nothing;
    return data ? data : &nothing;
}

/* Finds inputs and outputs. Returns whether all is as planned. */
static int open_tensors(struct kernel_call *kernel) {
    struct call *call = &kernel->call;
    const struct bucket *bucket = call->bucket;
    struct session *session = call->session;
    int64_t dimensions[MOST_DIMENSIONS];
    int rank;
    if (tf.inputs(kernel->context) != bucket->members + 1) {
        fail(call, TF_INVALID_ARGUMENT, "there are more or fewer gradients than was planned");
        return 0;
    }
    const double *samples = input(kernel, 0, FLOAT64, sizeof *samples, dimensions, &rank);
    if (!samples)
        return 0;
    call->samples = *samples;
    int64_t number = (int64_t)session->statistics[COUNT] + (bucket->index == 0);
    for (int64_t i = 0; i < bucket->members; i++) {
        int type = (int)bucket->types[i];
        size_t bytes = (size_t)(bucket->sizes[i] * item_bytes(type));
        call->gradients[i] = input(kernel, (int)i + 1, type, bytes, dimensions, &rank);
        if (!call->gradients[i])
            return 0;
        /* Of what is summed in place, the part that is looked at must be kept: who has a value that is not finite? */
        int is_whole = session->looks && number % session->whole_every == 0;
        int is_packed = bucket->members > 1 || type != bucket->type; /* then it stays as it is until it was looked at */
        int forward = is_packed || ((int64_t)bytes > session->looked_at_bytes && !is_whole);
        call->means[i] = output(kernel, (int)i, type, bytes, dimensions, rank, forward);
        if (!call->means[i])
            return 0;
    }
    int is_shared = bucket->members == 1 && call->means[0] == call->gradients[0];
    call->in_place = is_shared && bucket->types[0] == bucket->type;
    return 1;
}

EXPORTED void mpitrain_compute(void *attribute, void *context) {
    struct kernel_call kernel = {.call = {.fail = fail}, .context = context, .status = tf.new_status()};
    struct call *call = &kernel.call;
    if (!attribute) {
        fail(call, TF_RESOURCE_EXHAUSTED, "no memory for the operation, or another process has made this graph");
        tf.delete_status(kernel.status);
        return;
    }
    const struct bucket *bucket = (const struct bucket *)(uintptr_t) * (int64_t *)attribute;
    struct session *session = bucket->update->session;
    call->bucket = bucket;
    call->session = session;
    call->gradients = calloc((size_t)bucket->members, sizeof *call->gradients);
    call->means = calloc((size_t)bucket->members, sizeof *call->means);
    int is_open = call->gradients && call->means;
    if (!is_open)
        fail(call, TF_RESOURCE_EXHAUSTED, "no memory for the exchange of gradients");
    else
        is_open = open_tensors(&kernel);
    if (is_open)
        exchange(call);
    else if (session->under_way == bucket->update && session->next == bucket->index)
        session->under_way = NULL; /* it is not gone on with */
    free(call->gradients);
    free(call->means);
    tf.delete_status(kernel.status);
}
