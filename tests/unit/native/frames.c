/* What stands in for XLA: its table of functions, and frames of calls, as they should be and as they should not. */
#include "fakes.h"
#include "xla.h"

#include <string.h>

#define LENGTH(array) ((int64_t)(sizeof(array) / sizeof *(array)))
#define MOST_VALUES (MOST_MEMBERS + 3)

int mpitrain_setup_xla(const void *(*get_api)(void), const char *name, char *message, int64_t message_bytes);

/* Errors, which are XLA's. */

struct error {
    int code;
    char message[5000];
};

static int64_t errors; /* not destroyed yet, of the setup */

static void *create_error(struct xla_create_error *arguments) {
    CHECK(arguments->struct_size == offsetof(struct xla_create_error, code) + sizeof arguments->code, "another size");
    CHECK(arguments->code, "an error without a reason");
    struct error *error = own_memory(sizeof *error);
    error->code = arguments->code;
    snprintf(error->message, sizeof error->message, "%s", arguments->message);
    return error;
}

static void message_of_error(struct xla_message_of_error *arguments) {
    arguments->message = ((struct error *)arguments->error)->message;
}

static void destroy_error(struct xla_destroy_error *arguments) {
    free(arguments->error);
    errors--;
}

/* The table, and what is registered. */

static xla_handler_t handler;
static int refuses;

static void *register_handler(struct xla_register *arguments) {
    CHECK(arguments->struct_size == offsetof(struct xla_register, traits) + sizeof arguments->traits, "another size");
    CHECK(arguments->platform.size == 4 && !memcmp(arguments->platform.bytes, "Host", 4), "another platform");
    CHECK(arguments->name.size == 4 && !memcmp(arguments->name.bytes, "name", 4), "another name");
    CHECK(!arguments->instantiate && !arguments->prepare && !arguments->initialize, "other stages");
    if (refuses) {
        errors++;
        struct xla_create_error error = {offsetof(struct xla_create_error, code) + sizeof error.code, NULL, "taken", 6};
        return create_error(&error);
    }
    handler = arguments->execute;
    return NULL;
}

static struct xla_api api = {.struct_size = sizeof api,
                             .version = {sizeof(struct xla_version), NULL, XLA_MAJOR, XLA_MINOR},
                             .create_error = create_error,
                             .message_of_error = message_of_error,
                             .destroy_error = destroy_error,
                             .register_handler = register_handler};

static const void *get_api(void) {
    return &api;
}

static const void *get_no_api(void) {
    return NULL;
}

static void *ask_version(size_t extension_bytes, size_t metadata_bytes, size_t version_bytes, struct xla_metadata *one) {
    *one = (struct xla_metadata){metadata_bytes, {version_bytes, NULL, -1, -1}, 7};
    struct xla_metadata_extension own = {{extension_bytes, XLA_METADATA, NULL}, one};
    struct xla_extension other = {sizeof other, 77, &own.base};
    struct xla_frame frame = {.struct_size = sizeof frame, .extension = &other, .api = &api};
    return handler(&frame);
}

void frames_setup(void) {
    char message[6] = "";
    CHECK(!mpitrain_setup_xla(get_no_api, "name", message, sizeof message) && !strcmp(message, "its t"), "%s", message);
    const int64_t versions[][2] = {{1, 2}, {0, 0}, {-1, 1}};
    for (int i = 0; i < 3; i++) { /* of another layout: nothing of it is called */
        api.version.major = (int)versions[i][0], api.version.minor = (int)versions[i][1];
        CHECK(!mpitrain_setup_xla(get_api, "name", message, sizeof message) && !handler, "version %d was taken", i);
    }
    api.version.major = XLA_MAJOR, api.version.minor = XLA_MINOR, api.struct_size = 16;
    CHECK(!mpitrain_setup_xla(get_api, "name", message, sizeof message) && !handler, "a smaller table was taken");
    api.struct_size = sizeof api, refuses = 1;
    CHECK(!mpitrain_setup_xla(get_api, "name", message, sizeof message) && !strcmp(message, "taken"), "%s", message);
    refuses = 0;
    CHECK(!errors, "%lld errors were not destroyed", (long long)errors);
    for (int minor = XLA_OLDEST_MINOR; minor < XLA_MINOR + 2; minor++) {
        api.version.minor = minor;
        CHECK(mpitrain_setup_xla(get_api, "name", message, sizeof message), "version 0.%d was refused", minor);
        struct xla_metadata metadata;
        size_t sizes[] = {sizeof(struct xla_metadata_extension), sizeof metadata, sizeof(struct xla_version)};
        CHECK(!ask_version(sizes[0], sizes[1], sizes[2], &metadata), "no version");
        CHECK(metadata.version.major == 0 && metadata.version.minor == (minor < XLA_MINOR ? minor : XLA_MINOR), "which?");
        for (int which = 0; which < 3; which++) {
            void *error = ask_version(which == 0 ? 24 : sizes[0], which == 1 ? 16 : sizes[1],
                                      which == 2 ? 16 : sizes[2], &metadata);
            CHECK(error && metadata.version.minor == -1 && metadata.traits == 7, "another layout was written");
            free(error);
        }
    }
    api.version.minor = XLA_MINOR;
}

/* One call. */

struct call_of_xla {
    struct xla_frame frame;
    struct xla_buffer arguments[MOST_VALUES], results[MOST_VALUES];
    void *argument_items[MOST_VALUES], *result_items[MOST_VALUES], *attribute_items[2];
    int argument_types[MOST_VALUES], result_types[MOST_VALUES], attribute_types[2];
    struct xla_span spans[2], *names[2];
    struct xla_scalar scalars[2];
    int64_t numbers[2];
    int32_t turn, next;
};

static int type_of_xla(int type) {
    return type == FLOAT64 ? XLA_F64 : type == FLOAT32 ? XLA_F32 : type == BFLOAT16 ? XLA_BF16 : type == FLOAT16 ? XLA_F16 : 0;
}

static struct xla_buffer buffer_of(const struct tensor *tensor) {
    return (struct xla_buffer){.struct_size = sizeof(struct xla_buffer),
                               .type = type_of_xla(tensor->type),
                               .data = tensor->data,
                               .rank = tensor->rank,
                               .dimensions = (int64_t *)tensor->dimensions};
}

/* With this bucket, or 0; the tensors of `context`, of which outputs are made here. */
static void open_frame(struct call_of_xla *own, int64_t bucket, struct context *context) {
    *own = (struct call_of_xla){.turn = INT32_MAX, .numbers = {bucket, PROCESS}};
    int32_t *turns[] = {&own->turn, &own->next};
    struct xla_buffer *first[] = {&own->arguments[0], &own->results[0]};
    for (int i = 0; i < 2; i++)
        *first[i] = (struct xla_buffer){sizeof(struct xla_buffer), NULL, XLA_S32, turns[i], 0, NULL};
    int count = bucket ? context->count : 0;
    for (int i = 0; i < count; i++) {
        own->arguments[i + 1] = buffer_of(&context->inputs[i]);
        if (i == 0)
            continue;
        struct tensor *output = &context->outputs[i - 1];
        *output = context->inputs[i];
        if (!context->forwards) {
            output->data = NULL;
            make_tensor(output, output->type, output->dimensions[0]);
        }
        own->results[i] = buffer_of(output);
    }
    for (int i = 0; i < MOST_VALUES; i++) {
        own->argument_items[i] = &own->arguments[i], own->result_items[i] = &own->results[i];
        own->argument_types[i] = own->result_types[i] = XLA_BUFFER;
    }
    static const char *const names[] = {"bucket", "process"};
    for (int i = 0; i < 2; i++) {
        own->spans[i] = (struct xla_span){names[i], strlen(names[i])}, own->names[i] = &own->spans[i];
        own->scalars[i] = (struct xla_scalar){XLA_S64, &own->numbers[i]}, own->attribute_items[i] = &own->scalars[i];
        own->attribute_types[i] = XLA_SCALAR;
    }
    own->frame = (struct xla_frame){
        .struct_size = sizeof own->frame,
        .api = &api,
        .stage = XLA_EXECUTE,
        .arguments = {sizeof(struct xla_list), NULL, count + 1, own->argument_types, own->argument_items},
        .results = {sizeof(struct xla_list), NULL, count > 1 ? count : 1, own->result_types, own->result_items},
        .attributes = {sizeof(struct xla_attributes), NULL, 2, own->attribute_types, own->names, own->attribute_items}};
}

static void end_call(struct context *context, struct error *error) {
    if (!error)
        return;
    context->failed = error->code;
    snprintf(context->message, sizeof context->message, "%s", error->message);
    free(error);
}

void frame_compute(const struct bucket *bucket, struct context *context) {
    struct call_of_xla own;
    open_frame(&own, (int64_t)(uintptr_t)bucket, context);
    end_call(context, handler(&own.frame));
    CHECK(context->failed || own.next == INT32_MIN, "the turn is not counted");
}

void frame_without_bucket(void) {
    struct context context = {0};
    for (int which = 0; which < 4; which++) {
        struct call_of_xla own;
        open_frame(&own, 0, &context);
        own.turn = 5;
        own.frame.arguments.size += which == 1, own.frame.results.size -= which == 2, own.arguments[0].type += which == 3;
        struct error *error = handler(&own.frame);
        CHECK(!error == (which == 0) && own.next == (which ? 0 : 6), "case %d", which);
        free(error);
    }
}

/* A frame of which one thing is another: nothing is exchanged, nothing is written. Returns 0 where there are no more. */
int frame_with_fault(const struct bucket *bucket, struct context *context, int which) {
    struct call_of_xla own;
    open_frame(&own, (int64_t)(uintptr_t)bucket, context);
    struct xla_frame *frame = &own.frame;
    size_t *const sizes[] = {&frame->struct_size,           &frame->arguments.struct_size, &frame->results.struct_size,
                             &frame->attributes.struct_size, &own.arguments[0].struct_size, &own.arguments[1].struct_size,
                             &own.arguments[2].struct_size, &own.results[0].struct_size,   &own.results[1].struct_size,
                             &own.spans[0].size,            &own.spans[1].size};
    int64_t *const counts[] = {&frame->arguments.size, &frame->results.size,  &frame->attributes.size,
                               &own.numbers[1],        &own.arguments[0].rank, &own.arguments[1].rank,
                               &own.arguments[2].rank, &own.results[1].rank};
    int *const kinds[] = {&frame->stage,          &own.argument_types[0], &own.argument_types[1], &own.argument_types[2],
                          &own.result_types[0],   &own.result_types[1],   &own.attribute_types[0], &own.attribute_types[1],
                          &own.arguments[0].type, &own.arguments[1].type, &own.arguments[2].type,  &own.results[0].type,
                          &own.results[1].type,   &own.scalars[0].type,   &own.scalars[1].type};
    void **const data[] = {&own.arguments[0].data, &own.arguments[1].data, &own.arguments[2].data, &own.results[0].data,
                           &own.results[1].data};
    int64_t huge[] = {INT64_MAX, 3, 0}, other[] = {bucket->sizes[0] + 1}, negative[] = {-1, -bucket->sizes[0]};
    const struct {
        int64_t rank, *dimensions;
    } shapes[] = {{2, huge}, {1, other}, {1, negative}, {3, huge}};
    int place = which;
    if (place < LENGTH(sizes))
        *sizes[place] -= 1;
    else if ((place -= (int)LENGTH(sizes)) < LENGTH(counts))
        *counts[place] = place == 3 ? PROCESS + 1 : place == 4 || place == 5 ? -1 : *counts[place] - 1;
    else if ((place -= (int)LENGTH(counts)) < LENGTH(counts))
        *counts[place] = place == 2 ? 0 : place == 3 ? 0 : place == 4 ? INT64_MIN : -1;
    else if ((place -= (int)LENGTH(counts)) < LENGTH(kinds))
        *kinds[place] += 1;
    else if ((place -= (int)LENGTH(kinds)) < LENGTH(data))
        *data[place] = NULL;
    else if ((place -= (int)LENGTH(data)) < 2 * LENGTH(shapes)) {
        struct xla_buffer *changed = place % 2 ? &own.results[1] : &own.arguments[2];
        changed->rank = shapes[place / 2].rank, changed->dimensions = shapes[place / 2].dimensions;
    } else
        return 0;
    struct error *error = handler(&own.frame);
    CHECK(error && error->code == TF_INVALID_ARGUMENT, "fault %d was not seen", which);
    free(error);
    return 1;
}
