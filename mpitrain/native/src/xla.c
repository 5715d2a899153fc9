/* The exchange as a call out of a program that XLA has compiled.
 *
 * Arguments: a number that orders the calls, this rank's samples and the gradients. Results: the next number, and the
 * means, which take the memory of the gradients. Of a bucket the program knows the address, which is that of one
 * process only, and therefore a number that no other process has, too. */
#include "native.h"
#include "xla.h"

#include <stdlib.h>
#include <string.h>

#define SIZE_UP_TO(type, last) (offsetof(type, last) + sizeof(((type *)0)->last))

static const struct xla_api *xla;

/* One call from XLA. */
struct xla_call {
    struct call call; /* first, so that a pointer to it is one to the whole */
    void *error;
};

static void *error_of(int code, const char *message) {
    struct xla_create_error arguments = {SIZE_UP_TO(struct xla_create_error, code), NULL, message, code};
    return xla->create_error(&arguments);
}

static void fail(struct call *call, int code, const char *message) {
    ((struct xla_call *)call)->error = error_of(code, message); /* absl::StatusCode, which TF_Code is, too */
}

/* The attribute `name`, a number of 64 bits. */
static int attribute(const struct xla_attributes *attributes, const char *name, int64_t *value) {
    for (int64_t i = 0; i < attributes->size; i++) {
        const struct xla_span *own = attributes->names[i];
        const struct xla_scalar *scalar = attributes->items[i];
        if (own->size == strlen(name) && !memcmp(own->bytes, name, own->size) && attributes->types[i] == XLA_SCALAR &&
            scalar->type == XLA_S64) {
            memcpy(value, scalar->value, sizeof *value);
            return 1;
        }
    }
    return 0;
}

/* The memory of one argument or result, if it is of this dtype and size. */
static void *memory(const struct xla_list *list, int64_t index, int type, int64_t size) {
    const struct xla_buffer *buffer = list->types[index] == XLA_BUFFER ? list->items[index] : NULL;
    if (!buffer || buffer->struct_size < SIZE_UP_TO(struct xla_buffer, dimensions) || buffer->type != type)
        return NULL;
    int64_t found = buffer->rank < 0 ? -1 : 1;
    for (int64_t i = 0; i < buffer->rank; i++)
        if (__builtin_mul_overflow(found, buffer->dimensions[i], &found))
            return NULL;
    static double nothing; /* there may be no memory for an array without elements */
    return found != size ? NULL : buffer->data ? buffer->data : size ? NULL : &nothing;
}

static int type_of(int64_t type) {
    return type == FLOAT64 ? XLA_F64 : type == FLOAT32 ? XLA_F32 : type == BFLOAT16 ? XLA_BF16 : XLA_F16;
}

/* Finds arguments and results. Returns whether all is as planned. */
static int open_buffers(struct call *call, const struct xla_frame *frame) {
    const struct bucket *bucket = call->bucket;
    const struct xla_list *arguments = &frame->arguments, *results = &frame->results;
    if (arguments->size != bucket->members + 2 || results->size != bucket->members + 1)
        return 0;
    const int32_t *turn = memory(arguments, 0, XLA_S32, 1);
    int32_t *next = memory(results, 0, XLA_S32, 1);
    const double *samples = memory(arguments, 1, XLA_F64, 1);
    if (!turn || !next || !samples)
        return 0;
    *next = (int32_t)((uint32_t)*turn + 1);
    call->samples = *samples;
    for (int64_t i = 0; i < bucket->members; i++) {
        call->gradients[i] = memory(arguments, i + 2, type_of(bucket->types[i]), bucket->sizes[i]);
        call->means[i] = memory(results, i + 1, type_of(bucket->types[i]), bucket->sizes[i]);
        if (!call->gradients[i] || !call->means[i])
            return 0;
    }
    int is_shared = bucket->members == 1 && call->means[0] == call->gradients[0];
    call->in_place = is_shared && bucket->types[0] == bucket->type;
    return 1;
}

static void *run(const struct xla_frame *frame, const struct bucket *bucket) {
    struct session *session = bucket->update->session;
    struct xla_call own = {.call = {bucket, session, .fail = fail}};
    struct call *call = &own.call;
    call->gradients = calloc((size_t)bucket->members, sizeof *call->gradients);
    call->means = calloc((size_t)bucket->members, sizeof *call->means);
    int has_memory = call->gradients && call->means;
    if (has_memory && open_buffers(call, frame)) {
        exchange(call);
    } else {
        fail(call, has_memory ? TF_INVALID_ARGUMENT : TF_RESOURCE_EXHAUSTED,
             has_memory ? "a gradient has another size or dtype than was planned"
                        : "no memory for the exchange of gradients");
        if (session->under_way == bucket->update && session->next == bucket->index)
            session->under_way = NULL; /* it is not gone on with */
    }
    free(call->gradients);
    free(call->means);
    return own.error;
}

/* Without a bucket it is tried out whether XLA calls at all, and how: the next number. */
static void *try_out(const struct xla_frame *frame) {
    int is_one = frame->arguments.size == 1 && frame->results.size == 1;
    const int32_t *turn = is_one ? memory(&frame->arguments, 0, XLA_S32, 1) : NULL;
    int32_t *next = is_one ? memory(&frame->results, 0, XLA_S32, 1) : NULL;
    if (!turn || !next)
        return error_of(TF_INVALID_ARGUMENT, "XLA calls otherwise than was asked for");
    *next = *turn + 1;
    return NULL;
}

static void *tell_version(const struct xla_extension *extension) {
    struct xla_metadata *metadata = NULL;
    if (extension->struct_size >= SIZE_UP_TO(struct xla_metadata_extension, metadata))
        metadata = ((const struct xla_metadata_extension *)extension)->metadata;
    if (!metadata || metadata->struct_size < SIZE_UP_TO(struct xla_metadata, version) ||
        metadata->version.struct_size < SIZE_UP_TO(struct xla_version, minor))
        return error_of(TF_INVALID_ARGUMENT, "XLA asks otherwise than was expected");
    metadata->version.major = XLA_MAJOR;
    metadata->version.minor = xla->version.minor < XLA_MINOR ? xla->version.minor : XLA_MINOR;
    return NULL;
}

/* The handler. What has another size than was looked at is neither read nor written. */
static void *answer(struct xla_frame *frame) {
    if (frame->struct_size < SIZE_UP_TO(struct xla_frame, attributes))
        return error_of(TF_INVALID_ARGUMENT, "XLA calls otherwise than was asked for");
    for (struct xla_extension *one = frame->extension; one; one = one->next)
        if (one->type == XLA_METADATA)
            return tell_version(one);
    int64_t bucket = 0, process = 0;
    if (frame->stage != XLA_EXECUTE || frame->arguments.struct_size != sizeof(struct xla_list) ||
        frame->results.struct_size != sizeof(struct xla_list) ||
        frame->attributes.struct_size != sizeof(struct xla_attributes) ||
        !attribute(&frame->attributes, "bucket", &bucket) || !attribute(&frame->attributes, "process", &process))
        return error_of(TF_INVALID_ARGUMENT, "XLA calls otherwise than was asked for");
    if (process != own_process)
        return error_of(TF_INVALID_ARGUMENT, "another process compiled this program, whose memory is not there");
    return bucket ? run(frame, (const struct bucket *)(uintptr_t)bucket) : try_out(frame);
}

/* Makes the exchange known to XLA under `name`. Returns 1, or 0 and why not. */
EXPORTED int mpitrain_setup_xla(const void *(*get_api)(void), const char *name, char *message, int64_t message_bytes) {
    xla = get_api();
    const char *reason = "its table of functions is another one";
    void *error = NULL;
    if (xla && xla->struct_size >= SIZE_UP_TO(struct xla_api, register_handler) && xla->version.major == XLA_MAJOR &&
        xla->version.minor >= XLA_OLDEST_MINOR) {
        struct xla_register arguments = {.struct_size = SIZE_UP_TO(struct xla_register, traits),
                                         .name = {name, strlen(name)},
                                         .platform = {"Host", 4},
                                         .execute = answer};
        error = xla->register_handler(&arguments);
        if (!error)
            return 1;
        struct xla_message_of_error text = {SIZE_UP_TO(struct xla_message_of_error, message), NULL, error, NULL};
        xla->message_of_error(&text);
        reason = text.message;
    }
    strncpy(message, reason, (size_t)message_bytes - 1);
    if (error) {
        struct xla_destroy_error arguments = {SIZE_UP_TO(struct xla_destroy_error, error), NULL, error};
        xla->destroy_error(&arguments);
    }
    return 0;
}
