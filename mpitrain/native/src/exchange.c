/* The mean of one bucket over all ranks, whoever hands the gradients over: a kernel of TensorFlow or a program of XLA. */
#include "native.h"

#include <math.h>
#include <string.h>

#define MESSAGE_BYTES 4000
#define EXACT 0x1p53 /* whole numbers up to this add up without rounding */

/* Python does it, or tells of it. Returns whether the step goes on. */
static int by_python(struct call *call, int why, int64_t detail, const void *mean) {
    char message[MESSAGE_BYTES] = "";
    int code = call->session->python(call->bucket, why, detail, call->gradients, call->means, call->samples, mean,
                                     message, sizeof message);
    if (!code)
        return 1;
    message[sizeof message - 1] = 0;
    call->fail(call, code, message);
    return 0;
}

/* MPI has failed: Python tells of it. Messages may still arrive, so nothing more happens here. */
static int failed(struct call *call, int error) {
    call->session->failed = 1;
    return by_python(call, FAILED, error, NULL) * 0;
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
        return failed(call, error);
    double waited = now() - start;
    *session->waiting += waited;
    int64_t step = session->header_bytes / 8;
    for (int64_t rank = 0; rank < session->size; rank++)
        if (memcmp(session->all + rank * step, &update->signature, 8))
            return 2;
    if (!weigh(session, update, &total))
        return 2;
    session->under_way = update;
    session->next = 0;
    if (!update->counts)
        return 1;
    memcpy(session->seen, session->all, (size_t)(session->header_bytes * session->size));
    session->fresh = 1;
    session->statistics[COUNT] += 1;
    session->statistics[WAITING] = *session->waiting;
    session->statistics[SAMPLES] += total;
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
    int is_direct = bucket->members == 1 && bucket->types[0] == bucket->type && !session->survives;
    char *target = is_direct ? call->means[0] : scratch(session, FLAT, bucket->size * item);
    const void *source = target;
    const void *own = call->gradients[0];
    if (call->in_place && session->looks) {
        kept = looked_at(call);
        void *memory = scratch(session, KEPT, kept * item);
        own = memory ? memcpy(memory, own, (size_t)(kept * item)) : NULL;
    }
    if (!target || !own) {
        call->fail(call, TF_RESOURCE_EXHAUSTED, "no memory for the exchange of gradients");
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
        call->fail(call, TF_RESOURCE_EXHAUSTED, "no memory for the exchange of gradients");
        return 0;
    }
    if (error)
        return failed(call, error);
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

/* Whether Python has nothing to do with this bucket. */
static int is_usual(const struct bucket *bucket) {
    const struct update *update = bucket->update;
    const struct session *session = update->session;
    if (session->failed || __atomic_load_n(&session->turn[OTHERS_CAME], __ATOMIC_ACQUIRE) || session->turn[OBSERVED] ||
        session->ranks != session->turn[RANKS])
        return 0;
    /* How it is summed; else ranks measure it together. Messages larger than `largest_bytes` are cut by Python. */
    int is_known = session->how[CHOSEN] && session->how[SEGMENT_BYTES] <= session->largest_bytes;
    if (!is_known && !update->is_small)
        return 0;
    if (bucket->index > 0)
        return session->under_way == update && session->next == bucket->index;
    return update->ready && !session->pending && !session->under_way;
}

/* Bucket by bucket without Python, where that has nothing to do with it. */
void exchange(struct call *call) {
    const struct bucket *bucket = call->bucket;
    const struct update *update = bucket->update;
    struct session *session = call->session;
    int takes = is_usual(bucket) && mpitrain_take_turn(session->turn);
    if (takes && !is_usual(bucket)) { /* any more: another thread had the turn meanwhile */
        mpitrain_give_turn(session->turn);
        takes = 0;
    }
    if (!takes) {
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
        if (update->counts && session->next == update->buckets)
            session->activity[UPDATES] = (int64_t)session->statistics[COUNT];
    }
    session->activity[INSIDE] = 0;
    if (goes_on == 2)
        by_python(call, GATHERED, 0, NULL);
    int others_came = (int)__atomic_load_n(&session->turn[OTHERS_CAME], __ATOMIC_ACQUIRE);
    mpitrain_give_turn(session->turn);
    if (goes_on == 1 && others_came)
        by_python(call, CONTENDED, 0, NULL);
}
