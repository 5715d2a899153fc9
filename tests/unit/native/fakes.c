/* See `fakes.h`. Memory has exactly the size that is asked for, so that AddressSanitizer sees each step beyond it. */
#include "fakes.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>

_Thread_local struct rank me;
char in_place; /* its address stands for MPI_IN_PLACE */

int64_t item_of(int64_t type) {
    return type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : 2;
}

/* Memory of which there is none (linked with --wrap). */

void *__real_malloc(size_t), *__real_calloc(size_t, size_t), *__real_aligned_alloc(size_t, size_t);
void *__wrap_malloc(size_t), *__wrap_calloc(size_t, size_t), *__wrap_aligned_alloc(size_t, size_t);
static _Thread_local volatile int inside; /* the driver's own; the compiler believes that calloc does not read it */

static int fails(int64_t *countdown) {
    return !inside && *countdown > 0 && --*countdown == 0;
}

void *__wrap_malloc(size_t bytes) {
    return fails(&me.fail_memory) ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes) {
    return fails(&me.fail_memory) ? NULL : __real_calloc(count, bytes);
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes) {
    CHECK(bytes > 0 && bytes % alignment == 0, "%zu bytes", bytes);
    return fails(&me.fail_memory) ? NULL : __real_aligned_alloc(alignment, bytes);
}

void *own_memory(size_t bytes) {
    inside++;
    void *memory = calloc(1, bytes);
    inside--;
    CHECK(memory, "the driver has no memory");
    return memory;
}

/* TensorFlow. */

struct status {
    int code;
    char message[5000];
};

static void *new_status(void) {
    return own_memory(sizeof(struct status));
}

static void set_status(void *status, int code, const char *message) {
    struct status *one = status;
    one->code = code;
    snprintf(one->message, sizeof one->message, "%s", message);
}

static int get_code(const void *status) {
    return ((const struct status *)status)->code;
}

static int count_inputs(void *context) {
    return ((struct context *)context)->count;
}

static int no_tensor(void *status) {
    if (!fails(&me.fail_tensor))
        return 0;
    if (me.size % 2) /* or it does not say why */
        set_status(status, TF_RESOURCE_EXHAUSTED, "no such tensor today");
    return 1;
}

static void get_input(void *context, int index, void **tensor, void *status) {
    struct context *call = context;
    CHECK(index >= 0 && index < call->count, "input %d", index);
    if (no_tensor(status))
        return;
    *tensor = &call->inputs[index];
    call->handles++;
}

void make_tensor(struct tensor *tensor, int type, int64_t size) {
    *tensor = (struct tensor){.type = type, .rank = 1, .dimensions = {size}, .bytes = (size_t)(size * item_of(type))};
    tensor->data = size ? own_memory(tensor->bytes) : NULL;
}

static void *allocate(void *context, int output, int type, const int64_t *dimensions, int rank, size_t bytes,
                      void *status) {
    struct context *call = context;
    CHECK(output >= 0 && output < call->count - 1 && !call->outputs[output].type, "output %d", output);
    if (no_tensor(status))
        return NULL;
    struct tensor *tensor = &call->outputs[output];
    CHECK(rank == 1 && bytes == (size_t)(dimensions[0] * item_of(type)), "%zu bytes", bytes);
    make_tensor(tensor, type, dimensions[0]);
    call->handles++;
    return tensor;
}

static void *forward_or_allocate(void *context, const int *candidates, int candidate_count, int output,
                                 const int64_t *dimensions, int rank, int *forwarded, void *status) {
    struct context *call = context;
    CHECK(candidate_count == 1 && candidates[0] == output + 1, "candidate %d", candidates[0]);
    CHECK(!call->handles, "what is forwarded must not be held");
    const struct tensor *input = &call->inputs[output + 1];
    if (!call->forwards)
        return allocate(context, output, input->type, dimensions, rank, input->bytes, status);
    if (no_tensor(status))
        return NULL;
    *forwarded = output + 1;
    call->outputs[output] = *input;
    call->handles++;
    return &call->outputs[output];
}

static void delete_tensor(void *tensor) {
    CHECK(tensor, "no tensor");
    me.context->handles--;
}

static int rank_of(const void *tensor) {
    return ((const struct tensor *)tensor)->rank;
}

static int64_t dimension(const void *tensor, int index) {
    return ((const struct tensor *)tensor)->dimensions[index];
}

static void *data_of(const void *tensor) {
    return ((const struct tensor *)tensor)->data;
}

static size_t bytes_of(const void *tensor) {
    return ((const struct tensor *)tensor)->bytes;
}

static int type_of(const void *tensor) {
    return ((const struct tensor *)tensor)->type;
}

static void fail_call(void *context, void *status) {
    struct context *call = context;
    const struct status *one = status;
    CHECK(one->code, "a failure without a reason");
    CHECK(!call->failed, "failed twice: %s, %s", call->message, one->message);
    call->failed = one->code;
    snprintf(call->message, sizeof call->message, "%s", one->message);
}

static void get_attribute(void *construction, const char *name, int64_t *value, void *status) {
    int is_bucket = !strcmp(name, "bucket");
    CHECK(is_bucket || !strcmp(name, "process"), "%s", name);
    (void)status;
    *value = is_bucket ? (int64_t)(uintptr_t)construction : me.other_process ? PROCESS + 1 : PROCESS;
}

static void get_no_attribute(void *construction, const char *name, int64_t *value, void *status) {
    (void)construction, (void)name, (void)value;
    set_status(status, TF_INVALID_ARGUMENT, "there is no such attribute");
}

#define FUNCTIONS                                                                                                      \
    new_status, free, set_status, get_code, count_inputs, get_input, forward_or_allocate, allocate, delete_tensor,     \
        rank_of, dimension, data_of, bytes_of, type_of, fail_call
const struct tensorflow fake_tensorflow = {FUNCTIONS, get_attribute};
const struct tensorflow broken_attribute = {FUNCTIONS, get_no_attribute};

/* MPI: data move when both sides are known and somebody looks, so that each buffer must stay until its request is done.
 */

enum kind { SEND, RECEIVE, GATHER, REDUCE };

struct request {
    enum kind kind;
    int rank, other, count, done;
    handle type;
    const void *from;
    void *to;
    struct request *next; /* of all */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t barrier;
static struct request *requests; /* in the order in which they were made */
static int broken, ranks;

void start_messages(int size) {
    ranks = size;
    broken = 0;
    pthread_barrier_init(&barrier, NULL, (unsigned)size);
}

void meet(void) {
    pthread_barrier_wait(&barrier);
}

void break_messages(void) {
    pthread_mutex_lock(&lock);
    broken = 1;
    pthread_mutex_unlock(&lock);
}

int messages_are_broken(void) {
    pthread_mutex_lock(&lock);
    int is_so = broken;
    pthread_mutex_unlock(&lock);
    return is_so;
}

void forget_messages(void) {
    CHECK(broken || !requests, "a request was not waited for");
    for (struct request *next; requests; requests = next) {
        next = requests->next;
        free(requests);
    }
    broken = 0;
}

static int size_of_type(handle type) {
    return type == 1 ? 1 : type == 2 ? 4 : 8;
}

/* The first request of a kind that waits, of one rank. */
static struct request *waiting(enum kind kind, int rank, int other) {
    for (struct request *one = requests; one; one = one->next)
        if (one->kind == kind && one->rank == rank && !one->done && (other < 0 || one->other == other))
            return one;
    return NULL;
}

static void deliver(struct request *receive) {
    struct request *send = waiting(SEND, receive->other, receive->rank);
    if (!send)
        return;
    CHECK(send->count == receive->count, "%d bytes sent, %d received", send->count, receive->count);
    if (send->count)
        memcpy(receive->to, send->from, (size_t)send->count);
    send->done = receive->done = 1;
}

static void combine(enum kind kind) {
    struct request *all[MOST_RANKS];
    for (int rank = 0; rank < ranks; rank++)
        if (!(all[rank] = waiting(kind, rank, -1)))
            return;
    for (int rank = 0; rank < ranks; rank++) {
        CHECK(all[rank]->count == all[0]->count && all[rank]->type == all[0]->type, "counts differ");
        all[rank]->done = 1;
    }
    int count = all[0]->count;
    if (kind == GATHER) {
        for (int rank = 0; rank < ranks; rank++)
            for (int from = 0; from < ranks; from++)
                memcpy((char *)all[rank]->to + from * count, all[from]->from, (size_t)count);
        return;
    }
    for (int i = 0; i < count; i++) /* in the order of ranks */
        if (all[0]->type == 2) {
            float total = ((float *)all[0]->to)[i];
            for (int rank = 1; rank < ranks; rank++)
                total += ((float *)all[rank]->to)[i];
            for (int rank = 0; rank < ranks; rank++)
                ((float *)all[rank]->to)[i] = total;
        } else {
            double total = ((double *)all[0]->to)[i];
            for (int rank = 1; rank < ranks; rank++)
                total += ((double *)all[rank]->to)[i];
            for (int rank = 0; rank < ranks; rank++)
                ((double *)all[rank]->to)[i] = total;
        }
}

/* With the lock. What is asked again and again counts once, so that the n-th call is the same in each run. */
static int call_fails(void) {
    if (++me.calls == me.fail_call)
        broken = MPI_FAILED;
    return broken ? broken == MPI_FAILED && me.calls == me.fail_call ? MPI_FAILED : MPI_BROKEN : 0;
}

static int post(struct request wanted, handle comm, handle *result) {
    pthread_mutex_lock(&lock);
    int error = call_fails();
    pthread_mutex_unlock(&lock);
    if (error)
        return error;
    CHECK(comm == (handle)(100 + me.number) && wanted.count >= 0 && *result == 0, "%d", wanted.count);
    struct request *request = own_memory(sizeof *request), **last;
    *request = wanted;
    request->rank = me.number;
    pthread_mutex_lock(&lock);
    for (last = &requests; *last; last = &(*last)->next)
        ;
    *last = request;
    pthread_mutex_unlock(&lock);
    *result = (handle)(uintptr_t)request;
    return 0;
}

static int isend(const void *buffer, int count, handle type, int destination, int tag, handle comm, handle *result) {
    CHECK(type == 1 && tag == 0 && destination >= 0 && destination < ranks, "to %d", destination);
    CHECK(count <= LARGEST, "%d bytes", count);
    return post((struct request){.kind = SEND, .other = destination, .count = count, .from = buffer}, comm, result);
}

static int irecv(void *buffer, int count, handle type, int source, int tag, handle comm, handle *result) {
    CHECK(type == 1 && tag == 0 && source >= 0 && source < ranks, "from %d", source);
    return post((struct request){.kind = RECEIVE, .other = source, .count = count, .to = buffer}, comm, result);
}

static int test(handle *request, int *done, void *status) {
    int64_t larger_than_any[16] = {0};
    memcpy(status, larger_than_any, sizeof larger_than_any);
    CHECK((uintptr_t)status % 8 == 0, "MPI_Status has members of 8 bytes");
    struct request *one = (struct request *)(uintptr_t)*request, **place;
    CHECK(one && one->rank == me.number, "no request, or one of another rank");
    pthread_mutex_lock(&lock);
    if (!broken && !one->done && one->kind == RECEIVE)
        deliver(one);
    else if (!broken && !one->done && one->kind != SEND)
        combine(one->kind);
    int error = broken ? MPI_BROKEN : one->done ? call_fails() : 0;
    if (!error && (*done = one->done)) {
        for (place = &requests; *place != one; place = &(*place)->next)
            ;
        *place = one->next;
        free(one);
        *request = 0;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static int iallgather(const void *from, int count, handle type, void *to, int to_count, handle to_type, handle comm,
                      handle *result) {
    CHECK(type == 1 && to_type == 1 && count == to_count, "%d", count);
    return post((struct request){.kind = GATHER, .count = count, .type = 1, .from = from, .to = to}, comm, result);
}

static int iallreduce(const void *from, void *to, int count, handle type, handle op, handle comm, handle *result) {
    CHECK(count * size_of_type(type) <= LARGEST, "%d elements", count);
    CHECK(from == &in_place && op == 4 && (uintptr_t)to % (size_t)size_of_type(type) == 0, "%d", count);
    return post((struct request){.kind = REDUCE, .count = count, .type = type, .to = to}, comm, result);
}

static int allreduce(const void *from, void *to, int count, handle type, handle op, handle comm) {
    handle request = 0;
    int64_t status[16];
    int is_done = 0, error = iallreduce(from, to, count, type, op, comm, &request);
    while (!error && !is_done) {
        error = test(&request, &is_done, status);
        sched_yield();
    }
    return error;
}

const struct mpi fake_mpi = {isend, irecv, test, iallgather, allreduce, iallreduce};

/* Another thread may come in the moment before. */

int __real_mpitrain_take_turn(int64_t *), __wrap_mpitrain_take_turn(int64_t *);

int __wrap_mpitrain_take_turn(int64_t *turn) {
    if (me.before_turn)
        me.before_turn();
    return __real_mpitrain_take_turn(turn);
}

/* Python. */

int called_python(const struct bucket *bucket, int why, int64_t detail, const void *const *gradients,
                  void *const *means, double samples, const void *mean, char *message, int64_t message_bytes) {
    (void)means, (void)samples;
    CHECK(me.asked < 0, "Python was called twice: %d, %d", me.asked, why);
    me.asked = why, me.detail = detail, me.own = gradients[0], me.mean = mean;
    if (why == NOT_FINITE && bucket->types[0] == FLOAT32) {
        int64_t left = detail ? detail : bucket->sizes[0];
        memcpy(me.kept, gradients[0], (size_t)(left < 64 ? left : 64) * 4);
    }
    if (me.refuses || why == FAILED || why == CONTENDED) {
        memset(message, 'x', (size_t)message_bytes); /* as long as can be, without an end */
        return PYTHON_FAILED;
    }
    return 0;
}
