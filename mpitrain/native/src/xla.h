/* What is used of XLA's foreign functions, version 0.x: `xla/ffi/api/c_api.h`, whose names these have without prefix.
 * `tests/unit/native/test_program.py` compares them with that header. */
#ifndef MPITRAIN_XLA_H
#define MPITRAIN_XLA_H

#include <stddef.h>
#include <stdint.h>

enum { XLA_MAJOR = 0, XLA_OLDEST_MINOR = 1, XLA_MINOR = 2 }; /* those that were looked at: TensorFlow 2.18 to 2.21 */
enum { XLA_METADATA = 1, XLA_BUFFER = 1, XLA_SCALAR = 3, XLA_EXECUTE = 3 };
enum { XLA_S32 = 4, XLA_S64 = 5, XLA_F16 = 10, XLA_F32 = 11, XLA_F64 = 12, XLA_BF16 = 16 }; /* XLA_FFI_DataType */

struct xla_extension {
    size_t struct_size;
    int type;
    struct xla_extension *next;
};

struct xla_version {
    size_t struct_size;
    struct xla_extension *extension;
    int major, minor;
};

struct xla_metadata {
    size_t struct_size;
    struct xla_version version;
    uint32_t traits;
};

struct xla_metadata_extension {
    struct xla_extension base;
    struct xla_metadata *metadata;
};

struct xla_span {
    const char *bytes;
    size_t size;
};

struct xla_buffer {
    size_t struct_size;
    struct xla_extension *extension;
    int type;
    void *data;
    int64_t rank;
    int64_t *dimensions;
};

struct xla_scalar {
    int type;
    void *value;
};

/* Arguments, and results. */
struct xla_list {
    size_t struct_size;
    struct xla_extension *extension;
    int64_t size;
    int *types;
    void **items;
};

struct xla_attributes {
    size_t struct_size;
    struct xla_extension *extension;
    int64_t size;
    int *types;
    struct xla_span **names;
    void **items;
};

struct xla_api;

struct xla_frame {
    size_t struct_size;
    struct xla_extension *extension;
    const struct xla_api *api;
    void *context;
    int stage;
    struct xla_list arguments, results;
    struct xla_attributes attributes;
};

struct xla_create_error {
    size_t struct_size;
    struct xla_extension *extension;
    const char *message;
    int code;
};

struct xla_message_of_error {
    size_t struct_size;
    struct xla_extension *extension;
    void *error;
    const char *message;
};

struct xla_destroy_error {
    size_t struct_size;
    struct xla_extension *extension;
    void *error;
};

typedef void *(*xla_handler_t)(struct xla_frame *frame);

struct xla_register {
    size_t struct_size;
    struct xla_extension *extension;
    struct xla_span name, platform;
    xla_handler_t instantiate, prepare, initialize, execute;
    uint32_t traits;
};

struct xla_api {
    size_t struct_size;
    struct xla_extension *extension;
    struct xla_version version;
    const void *internal;
    void *(*create_error)(struct xla_create_error *);
    void (*message_of_error)(struct xla_message_of_error *);
    void (*destroy_error)(struct xla_destroy_error *);
    void *(*register_handler)(struct xla_register *);
};

#endif
