/* The machine code of `mpitrain/native/src`, run by ranks that are threads and compared with plain sums; what fails here
 * aborts. Built with sanitizers by `test_library.py`. */
#include "fakes.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

#define MOST_BUCKETS 3
#define SMALL 256 /* bytes; the sizes of these cases are around this and the next ones */
#define LOOKED_AT 96
#define WHOLE_EVERY 3

int mpitrain_setup(const struct tensorflow *, int64_t, const struct mpi *, int64_t, int64_t, int64_t, int64_t, int64_t);
void *mpitrain_create(void *construction);
void mpitrain_delete(void *kernel);
void mpitrain_compute(void *kernel, void *context);

/* What all ranks exchange. */
struct plan {
    uint64_t seed;
    int buckets, added_up;
    struct bucket bucket[MOST_BUCKETS];
    int64_t offsets[MOST_BUCKETS][MOST_MEMBERS], sizes[MOST_BUCKETS][MOST_MEMBERS], types[MOST_BUCKETS][MOST_MEMBERS];
};

/* One rank's side of it. */
struct job {
    struct plan plan;
    struct session session;
    struct update update;
    double mine[6], all[6 * MOST_RANKS], seen[6 * MOST_RANKS], waiting, statistics[4];
    int64_t activity[4], turn[4], how[3];
    double samples[MOST_RANKS]; /* of each rank */
    int forwards;
    double bad; /* unless 0, the first value of the first gradient of the last rank */
    struct context context;
};

static uint64_t mix(uint64_t a, uint64_t b) { /* splitmix64 */
    uint64_t z = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int64_t pick(uint64_t *state, int64_t below) {
    *state = mix(*state, 1);
    return (int64_t)(*state % (uint64_t)below);
}

/* Halves in plain arithmetic. */

static double of_half(uint16_t bits, int mantissa_bits, int bias) {
    int exponent = (bits & 0x7fff) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
    double value = exponent ? ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
                            : ldexp(mantissa, 1 - bias - mantissa_bits);
    return bits & 0x8000 ? -value : value;
}

static double rounded(double value, int mantissa_bits, int bias) {
    if (value == 0)
        return value;
    int exponent = ilogb(value) > 1 - bias ? ilogb(value) : 1 - bias;
    return ldexp(nearbyint(ldexp(value, mantissa_bits - exponent)), exponent - mantissa_bits);
}

static double value_of(int64_t type, const void *data, int64_t i) {
    if (type == FLOAT64)
        return ((const double *)data)[i];
    if (type == FLOAT32)
        return ((const float *)data)[i];
    uint16_t bits = ((const uint16_t *)data)[i];
    return type == BFLOAT16 ? of_half(bits, 7, 127) : of_half(bits, 10, 15);
}

static double as_type(int64_t type, double value) {
    return type == BFLOAT16 ? rounded(value, 7, 127) : type == FLOAT16 ? rounded(value, 10, 15) : value;
}

/* One element of one rank's gradient. */
static void put(void *data, int64_t i, int64_t type, uint64_t seed) {
    uint64_t bits = mix(seed, (uint64_t)i);
    double value = (double)(int64_t)bits * 0x1p-62;
    if (type == FLOAT64)
        ((double *)data)[i] = value;
    else if (type == FLOAT32)
        ((float *)data)[i] = (float)value;
    else if (type == BFLOAT16) /* exponents around 0 */
        ((uint16_t *)data)[i] = (uint16_t)((bits & 0x807f) | ((120 + (bits >> 16) % 12) << 7));
    else /* and those below the normal ones */
        ((uint16_t *)data)[i] = (uint16_t)((bits & 0x83ff) | (((bits >> 16) % 20) << 10));
}

static void fill(const struct job *job, int rank, int64_t update, int bucket, int member, void *data) {
    const struct plan *plan = &job->plan;
    uint64_t seed = mix(mix(plan->seed, (uint64_t)(update * 64 + rank)), (uint64_t)(bucket * MOST_MEMBERS + member));
    int64_t type = plan->types[bucket][member];
    for (int64_t i = 0; i < plan->sizes[bucket][member]; i++)
        put(data, i, type, seed);
    if (job->bad != 0 && rank == me.size - 1 && bucket == 0 && member == 0) {
        if (type == FLOAT64)
            *(double *)data = job->bad;
        else if (type == FLOAT32)
            *(float *)data = (float)job->bad;
        else
            *(uint16_t *)data = type == BFLOAT16 ? 0x7fc0 : 0x7e00;
    }
}

/* The weights of `reduction/reducer.py`. */
static void weights(const struct job *job, double before[], double *after) {
    double total = 0;
    int are_equal = 1;
    for (int rank = 0; rank < me.size; rank++) {
        total += job->samples[rank];
        are_equal &= job->samples[rank] == job->samples[0];
    }
    *after = !job->plan.added_up && are_equal && total > 0 ? 1.0 / me.size : 1.0;
    for (int rank = 0; rank < me.size; rank++)
        before[rank] = job->plan.added_up || *after != 1.0 || (me.size == 1 && total > 0)
                           ? (job->samples[rank] > 0 ? -1 : 0)
                           : total > 0 ? job->samples[rank] / total : 0;
}

/* In which order ranks are added up, for an element of a bucket. */
static int first_of(const struct job *job, const struct bucket *bucket, int64_t element) {
    if (me.size == 1 || bucket->size * item_of(bucket->type) < SMALL || !job->how[SEGMENT_BYTES])
        return 0;
    return (int)(element / ((bucket->size + me.size - 1) / me.size));
}

static double expected(const struct job *job, int index, int member, int64_t i, void *const data[],
                       const double before[], double after) {
    const struct bucket *bucket = &job->plan.bucket[index];
    int first = first_of(job, bucket, bucket->offsets[member] + i);
    double total = 0;
    for (int k = 0; k < me.size; k++) {
        int rank = (first + k) % me.size;
        double one = before[rank] == 0 ? 0 : value_of(bucket->types[member], data[rank], i);
        if (before[rank] > 0)
            one = bucket->type == FLOAT64 ? one * before[rank] : (float)one * (float)before[rank];
        total = k == 0 ? one : bucket->type == FLOAT64 ? total + one : (float)total + (float)one;
    }
    if (after != 1.0)
        total = bucket->type == FLOAT64 ? total * after : (float)total * (float)after;
    return as_type(bucket->types[member], total);
}

static void compare(const struct job *job, int64_t update, int index) {
    const struct bucket *bucket = &job->plan.bucket[index];
    double before[MOST_RANKS], after;
    weights(job, before, &after);
    for (int member = 0; member < bucket->members; member++) {
        const struct tensor *mean = &job->context.outputs[member];
        CHECK(mean->type == bucket->types[member] && mean->dimensions[0] == bucket->sizes[member], "another tensor");
        void *data[MOST_RANKS];
        for (int rank = 0; rank < me.size; rank++) {
            data[rank] = own_memory(((size_t)bucket->sizes[member] + 1) * 8);
            fill(job, rank, update, index, member, data[rank]);
        }
        for (int64_t i = 0; i < bucket->sizes[member]; i++) {
            double found = value_of(mean->type, mean->data, i);
            double wanted = expected(job, index, member, i, data, before, after);
            CHECK((found == wanted && signbit(found) == signbit(wanted)) || (job->bad != 0 && i == 0 && member == 0),
                  "rank %d of %d, seed %llu, update %lld, bucket %d, gradient %d of type %d, [%lld]: %.17g, not %.17g",
                  me.number, me.size, (unsigned long long)job->plan.seed, (long long)update, index, member, mean->type,
                  (long long)i, found, wanted);
        }
        for (int rank = 0; rank < me.size; rank++)
            free(data[rank]);
    }
}

static void open_context(struct job *job, int64_t update, int index) {
    const struct bucket *bucket = &job->plan.bucket[index];
    struct context *context = &job->context;
    *context = (struct context){.count = (int)bucket->members + 1, .forwards = job->forwards};
    make_tensor(&context->inputs[0], FLOAT64, 1);
    *(double *)context->inputs[0].data = job->samples[me.number];
    for (int member = 0; member < bucket->members; member++) {
        make_tensor(&context->inputs[member + 1], (int)bucket->types[member], bucket->sizes[member]);
        fill(job, me.number, update, index, member, context->inputs[member + 1].data);
    }
    me.context = context;
    me.asked = -1;
}

static void close_context(struct context *context) {
    for (int i = 0; i < MOST_MEMBERS + 2; i++) {
        if (i == 0 || context->outputs[i - 1].data != context->inputs[i].data)
            free(context->inputs[i].data);
        if (i < MOST_MEMBERS + 1)
            free(context->outputs[i].data);
    }
    CHECK(!context->handles, "%d tensors were not deleted", context->handles);
}

static int by_xla; /* and not by TensorFlow */

static void compute(struct job *job, int index) {
    int64_t kernel = (int64_t)(uintptr_t)&job->plan.bucket[index];
    if (by_xla)
        frame_compute(&job->plan.bucket[index], &job->context);
    else
        mpitrain_compute(&kernel, &job->context);
    CHECK(!job->turn[TAKEN] && !job->activity[INSIDE], "the turn was not given back");
}

/* One update as it should be; returns whether it was. Ends where a bucket fails. */
static int make_update(struct job *job, int64_t update) {
    for (int index = 0; index < job->plan.buckets; index++) {
        open_context(job, update, index);
        compute(job, index);
        if (job->context.failed)
            return 0;
        CHECK(me.asked == (job->bad != 0 && index == 0 ? NOT_FINITE : -1), "Python was asked: %d", me.asked);
        compare(job, update, index);
        close_context(&job->context);
    }
    CHECK(!job->session.under_way && job->session.fresh && job->activity[UPDATES] == job->statistics[COUNT], "no end");
    job->session.fresh = 0;
    return 1;
}

static void add_bucket(struct plan *plan, int64_t type, int members, const int64_t *types, const int64_t *sizes,
                       int gap) {
    int index = plan->buckets++;
    struct bucket *bucket = &plan->bucket[index];
    *bucket = (struct bucket){.index = index, .id = index + 1, .type = type, .members = members};
    for (int i = 0; i < members; i++) {
        plan->types[index][i] = types[i], plan->sizes[index][i] = sizes[i], plan->offsets[index][i] = bucket->size;
        bucket->size += sizes[i] + (i + 1 < members ? gap : 0);
    }
}

/* A job whose members point into it. */
static void start(struct job *job) {
    struct session *session = &job->session;
    int64_t is_small = 1;
    for (int i = 0; i < job->plan.buckets; i++) {
        struct bucket *bucket = &job->plan.bucket[i];
        bucket->update = &job->update;
        bucket->offsets = job->plan.offsets[i], bucket->sizes = job->plan.sizes[i], bucket->types = job->plan.types[i];
        is_small &= bucket->size * item_of(bucket->type) < SMALL;
    }
    job->how[CHOSEN] = 1;
    job->update = (struct update){.session = session,
                                  .signature = 1234567,
                                  .added_up = job->plan.added_up,
                                  .buckets = job->plan.buckets,
                                  .is_small = is_small,
                                  .ready = 1,
                                  .counts = 1};
    session->comm = (handle)(100 + me.number), session->byte = 1, session->float32 = 2, session->float64 = 3;
    session->sum = 4, session->in_place = &in_place;
    session->rank = me.number, session->size = me.size, session->looks = 1;
    session->small_bytes = SMALL, session->largest_bytes = LARGEST;
    session->looked_at_bytes = LOOKED_AT, session->whole_every = WHOLE_EVERY, session->header_bytes = sizeof job->mine;
    session->mine = job->mine, session->all = job->all, session->seen = job->seen, session->waiting = &job->waiting;
    session->statistics = job->statistics, session->activity = job->activity, session->turn = job->turn;
    session->how = job->how, session->python = called_python;
}

/* When all ranks are done: memory that the machine code keeps, and requests that an error has left. */
static void end(struct job *job) {
    meet();
    if (job->context.failed)
        close_context(&job->context);
    for (int i = 0; i < 3; i++)
        free(job->session.scratch[i]);
    if (me.number == 0)
        forget_messages();
    int number = me.number, size = me.size;
    me = (struct rank){.number = number, .size = size, .asked = -1};
    meet();
}

static const int64_t SIZES[] = {0,  1,  2,  3,  7,  15, 16, 17,  23,  24,  25,  31,  32, 33,
                                63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 200, 255, 257, 300};

static void random_plan(struct plan *plan, uint64_t *state) {
    plan->seed = *state;
    plan->added_up = pick(state, 4) == 0;
    int buckets = 1 + (int)pick(state, MOST_BUCKETS);
    for (int index = 0; index < buckets; index++) {
        int members = pick(state, 2) ? 1 : 1 + (int)pick(state, MOST_MEMBERS);
        int64_t type = pick(state, 4) ? FLOAT32 : FLOAT64, types[MOST_MEMBERS], sizes[MOST_MEMBERS];
        for (int i = 0; i < members; i++) {
            int64_t half = pick(state, 2) ? BFLOAT16 : FLOAT16;
            types[i] = type == FLOAT32 && pick(state, 3) == 0 ? half : type;
            sizes[i] = SIZES[pick(state, sizeof SIZES / sizeof *SIZES)];
        }
        add_bucket(plan, type, members, types, sizes, pick(state, 2) ? 0 : 5);
    }
}

/* Any plan, samples, way to sum. */
static void random_cases(uint64_t seed, int count) {
    for (int number = 0; number < count; number++) {
        struct job job = {0};
        uint64_t state = mix(seed, (uint64_t)number);
        random_plan(&job.plan, &state);
        start(&job);
        const int64_t segments[] = {0, 16, 48, 64, LARGEST};
        job.how[SEGMENT_BYTES] = segments[pick(&state, 5)];
        job.how[WINDOW] = pick(&state, 4) ? 1 + pick(&state, 5) : 1000000;
        job.session.crowded = pick(&state, 2), job.session.looks = pick(&state, 4) > 0;
        job.session.pairs = me.size == 2 && pick(&state, 2);
        job.session.survives = pick(&state, 3) == 0;
        job.forwards = (int)pick(&state, 2);
        for (int64_t update = 0; update < 2; update++) {
            int64_t kind = pick(&state, 4);
            for (int rank = 0; rank < me.size; rank++)
                job.samples[rank] = kind == 0 ? 0 : kind == 1 ? 8 : kind == 2 ? 3 + rank : rank == 0 ? 0 : 4;
            CHECK(make_update(&job, update), "%s", job.context.message);
        }
        end(&job);
    }
}

/* Small and large buckets of each kind; the sum of the last is taken in place. */
static void usual(struct job *job, int segment_bytes) {
    const int64_t types[] = {FLOAT32, FLOAT16, BFLOAT16}, sizes[] = {40, 9, 33}, wide[] = {FLOAT64}, large[] = {200};
    *job = (struct job){.forwards = 1};
    add_bucket(&job->plan, FLOAT32, 1, types, large, 0);
    add_bucket(&job->plan, FLOAT32, 3, types, sizes, 0);
    add_bucket(&job->plan, FLOAT64, 1, wide, large, 0);
    start(job);
    job->how[SEGMENT_BYTES] = segment_bytes, job->how[WINDOW] = 3;
    for (int rank = 0; rank < me.size; rank++)
        job->samples[rank] = 2;
}

/* Each call of MPI, each allocation, each tensor fails once, on one rank. */
static void failures(void) {
    for (int what = 0; what < 6; what++)
        for (int64_t at = 1; !by_xla || what != 3; at++) { /* XLA hands all tensors over */
            struct job job;
            usual(&job, what < 4 ? 64 : 0);
            job.session.crowded = what == 5, job.session.pairs = what == 1 && me.size == 2;
            int fails = me.number == me.size - 1, is_message = what != 2 && what != 3;
            if (fails)
                *(is_message ? &me.fail_call : what == 2 ? &me.fail_memory : &me.fail_tensor) = at;
            int went_well = make_update(&job, 0);
            if (!went_well && !is_message && fails) {
                CHECK(job.context.failed == TF_RESOURCE_EXHAUSTED, "code %d", job.context.failed);
                break_messages();
            } else if (!went_well) {
                CHECK(me.asked == FAILED && job.context.failed == PYTHON_FAILED, "asked %d", me.asked);
                CHECK(me.detail == (fails ? MPI_FAILED : MPI_BROKEN), "%lld", (long long)me.detail);
                CHECK(strlen(job.context.message) == 3999, "the message was not ended");
                close_context(&job.context);
                int64_t calls = me.calls;
                open_context(&job, 1, 0); /* messages may still arrive: nothing more happens in machine code */
                compute(&job, 0);
                CHECK(me.asked == EXCHANGE && me.calls == calls, "it went on after an error: %d", me.asked);
                close_context(&job.context);
                job.context.failed = 0;
            }
            CHECK(!job.session.under_way, "an update is under way");
            meet();
            int is_last = !messages_are_broken();
            CHECK(is_last || at < 1000, "no end");
            end(&job);
            if (is_last) {
                CHECK(at > (what == 2 ? 2 : 4), "only %lld", (long long)at);
                break;
            }
        }
}

/* What is not finite is shown to Python with this rank's own values, also where they were summed in place. */
static void not_finite(void) {
    const double bad[] = {NAN, INFINITY, -INFINITY};
    const int64_t types[] = {FLOAT32, FLOAT64, FLOAT16, BFLOAT16};
    for (int which = 0; which < 12; which++)
        for (int forwards = 0; forwards < 2; forwards++) {
            struct job job = {.forwards = forwards};
            int64_t type = types[which / 3], sizes[] = {200};
            add_bucket(&job.plan, type == FLOAT64 ? FLOAT64 : FLOAT32, 1, &type, sizes, 0);
            start(&job);
            job.how[SEGMENT_BYTES] = 48, job.how[WINDOW] = 2, job.bad = bad[which % 3];
            for (int rank = 0; rank < me.size; rank++)
                job.samples[rank] = 3 + rank;
            for (int64_t update = 0; update < WHOLE_EVERY; update++) {
                memset(me.kept, 0, sizeof me.kept);
                CHECK(make_update(&job, update), "%s", job.context.message);
                float own[200];
                if (type == FLOAT16 || type == BFLOAT16)
                    CHECK(!me.detail, "%lld of the values", (long long)me.detail); /* all of them are there */
                if (type == FLOAT32) {
                    fill(&job, me.number, update, 0, 0, own);
                    int looked_at = LOOKED_AT / 4;
                    CHECK(!memcmp(me.kept, own, (size_t)looked_at * 4), "other values than this rank's");
                }
            }
            me.refuses = 1; /* --non-finite stop */
            CHECK(!make_update(&job, WHOLE_EVERY) && job.context.failed == PYTHON_FAILED, "it went on");
            CHECK(!job.session.under_way, "an update is under way");
            end(&job);
        }
}

/* Tensors that are not those of the plan: nothing is sent. */
static void other_tensors(void) {
    for (int which = 0; which < 6; which++) {
        struct job job;
        usual(&job, 64);
        open_context(&job, 0, 1);
        struct tensor *changed = &job.context.inputs[which == 4 ? 0 : 2];
        if (which == 0)
            job.context.count++;
        else if (which == 1)
            job.context.count--;
        else if (which == 2)
            changed->type = BFLOAT16;
        else if (which == 3)
            changed->bytes -= 2;
        else if (which == 4)
            changed->type = FLOAT32;
        else
            changed->rank = 255;
        compute(&job, 1);
        CHECK(job.context.failed == TF_INVALID_ARGUMENT && !me.calls && me.asked < 0, "%d", job.context.failed);
        end(&job);
    }
}

/* Frames of XLA that are not as they should be. */
static void other_frames(void) {
    for (int which = 0, is_one = 1; is_one; which++) {
        struct job job;
        usual(&job, 64);
        open_context(&job, 0, 0);
        is_one = frame_with_fault(&job.plan.bucket[0], &job.context, which);
        CHECK(!me.calls && me.asked < 0 && !job.turn[TAKEN], "fault %d: something was exchanged", which);
        CHECK(is_one || which > 40, "only %d faults", which);
        close_context(&job.context);
        end(&job);
    }
}

static _Thread_local struct job *current;

static void another_begins(void) {
    current->session.under_way = &current->update, current->session.next = 1;
}

static void python_is_asked(struct job *job, int index, int why) {
    int64_t calls = me.calls;
    open_context(job, 0, index);
    compute(job, index);
    CHECK(me.asked == why && (why != EXCHANGE || me.calls == calls), "asked %d, not %d", me.asked, why);
    CHECK(!job->context.failed == (why != CONTENDED), "%s", job->context.message);
    close_context(&job->context);
    job->context.failed = 0;
}

/* All that is not usual is left to Python, before anything is sent. */
static void left_to_python(void) {
    struct job job;
    int64_t *const words[] = {&job.turn[OTHERS_CAME], &job.turn[OBSERVED], &job.turn[RANKS], &job.session.pending,
                              &job.how[CHOSEN], &job.update.ready};
    for (int which = 0; which < 6; which++) {
        usual(&job, 64);
        *words[which] = which < 4;
        python_is_asked(&job, 0, EXCHANGE);
        end(&job);
    }
    usual(&job, LARGEST + 16); /* which Python sends in pieces */
    python_is_asked(&job, 0, EXCHANGE);
    python_is_asked(&job, 1, EXCHANGE); /* no update is under way */
    job.session.under_way = &job.update, job.session.next = 2;
    python_is_asked(&job, 1, EXCHANGE);
    python_is_asked(&job, 0, EXCHANGE);
    end(&job);
    for (int which = 0; which < 2; which++) { /* how it is summed is known no more, as Python has begun the update */
        usual(&job, which ? LARGEST + 16 : 64);
        job.how[CHOSEN] = which, job.session.under_way = &job.update, job.session.next = 1;
        python_is_asked(&job, 1, EXCHANGE);
        end(&job);
    }

    usual(&job, 64); /* ranks that call other things, or numbers of samples that are not added up exactly */
    job.update.signature += me.number == me.size - 1;
    python_is_asked(&job, 0, me.size > 1 ? GATHERED : -1);
    CHECK(!job.session.fresh == (me.size > 1), "told as if all were the same");
    meet();
    end(&job);
    for (int which = 0; which < 4 && me.size > 1; which++) {
        const double odd[] = {0.1, -1, NAN, 0x1p60};
        usual(&job, 64);
        job.samples[me.number] = me.number ? 2 : odd[which];
        python_is_asked(&job, 0, GATHERED);
        end(&job);
    }
}

/* Threads that come at the same time: all ranks see it here, as the usual update goes to its end. */
static void contended(void) {
    struct job job;
    usual(&job, 64);
    job.turn[TAKEN] = 1;
    open_context(&job, 0, 0);
    int64_t kernel = (int64_t)(uintptr_t)&job.plan.bucket[0];
    mpitrain_compute(&kernel, &job.context);
    CHECK(me.asked == EXCHANGE && job.turn[TAKEN] && job.turn[OTHERS_CAME] && !me.calls, "asked %d", me.asked);
    close_context(&job.context);
    end(&job);

    usual(&job, 64); /* another one came and went while this one was about to take the turn */
    current = &job;
    me.before_turn = another_begins;
    python_is_asked(&job, 0, EXCHANGE);
    end(&job);
}

static void others_come(void) {
    current->turn[OTHERS_CAME] = 1;
}

static void come_meanwhile(void) {
    struct job job;
    usual(&job, 64);
    current = &job;
    me.before_turn = others_come;
    python_is_asked(&job, 0, EXCHANGE);
    end(&job);
    usual(&job, 64);
    mpitrain_take_turn(job.turn);
    mpitrain_take_turn(job.turn); /* in vain, as another thread would */
    mpitrain_give_turn(job.turn);
    python_is_asked(&job, 0, EXCHANGE);
    end(&job);
}

/* A kernel that TensorFlow could not make. */
static void no_kernel(void) {
    struct job job;
    usual(&job, 64);
    int64_t *kernel = mpitrain_create(&job.plan.bucket[0]);
    CHECK(*kernel == (int64_t)(uintptr_t)&job.plan.bucket[0], "another bucket");
    mpitrain_delete(kernel);
    me.other_process = 1;
    CHECK(!mpitrain_create(&job.plan.bucket[0]), "made for another process");
    me.other_process = 0;
    me.fail_memory = 1;
    CHECK(!mpitrain_create(&job.plan.bucket[0]), "made of no memory");
    CHECK(mpitrain_setup(&broken_attribute, sizeof broken_attribute, &fake_mpi, sizeof fake_mpi, sizeof(struct session),
                         sizeof(struct update), sizeof(struct bucket), PROCESS),
          "refused");
    kernel = mpitrain_create(NULL);
    CHECK(!kernel, "made for no bucket");
    open_context(&job, 0, 0);
    mpitrain_compute(NULL, &job.context);
    CHECK(job.context.failed == TF_RESOURCE_EXHAUSTED, "code %d", job.context.failed);
    mpitrain_delete(NULL);
    end(&job);
}

/* Threads. */

static void (*scenario)(void);
static int cases;

static void any_case(void) {
    random_cases(20260000 + (uint64_t)me.size, cases);
}

static void *thread(void *number) {
    me = (struct rank){.number = (int)(intptr_t)number & 15, .size = (int)(intptr_t)number >> 4, .asked = -1};
    scenario();
    return NULL;
}

static void run(void (*wanted)(void), int size) {
    pthread_t threads[MOST_RANKS];
    scenario = wanted;
    start_messages(size);
    for (int rank = 0; rank < size; rank++)
        CHECK(!pthread_create(&threads[rank], NULL, thread, (void *)(intptr_t)(size << 4 | rank)), "no thread");
    for (int rank = 0; rank < size; rank++)
        pthread_join(threads[rank], NULL);
}

int main(int count, char **arguments) {
    CHECK(count == 2, "usage: driver CASES");
    cases = atoi(arguments[1]);
    const int64_t sizes[] = {sizeof(struct session), sizeof(struct update), sizeof(struct bucket)};
    CHECK(!mpitrain_setup(&fake_tensorflow, sizeof fake_tensorflow, &fake_mpi, sizeof fake_mpi, sizes[0] + 8, sizes[1],
                          sizes[2], PROCESS),
          "another version was taken");
    CHECK(mpitrain_setup(&fake_tensorflow, sizeof fake_tensorflow, &fake_mpi, sizeof fake_mpi, sizes[0], sizes[1],
                         sizes[2], PROCESS),
          "refused");
    void (*const all[])(void) = {any_case, failures, not_finite, other_tensors, left_to_python, contended};
    for (int size = 1; size <= MOST_RANKS; size++)
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            run(all[i], size);
    frames_setup();
    frame_without_bucket();
    by_xla = 1;
    void (*const of_xla[])(void) = {any_case, failures, not_finite, left_to_python, other_frames};
    for (int size = 1; size <= MOST_RANKS; size++)
        for (size_t i = 0; i < sizeof of_xla / sizeof *of_xla; i++)
            run(of_xla[i], size);
    by_xla = 0;
    run(come_meanwhile, 1);
    run(no_kernel, 1);
    puts("all as it should be");
}
