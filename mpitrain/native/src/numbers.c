/* Arithmetic on arrays of gradients; the same bits as numpy gives. Compiled without contraction of a * b + c. */
#include "native.h"

#include <string.h>

static float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float from_bfloat16(uint16_t half) {
    return of_bits((uint32_t)half << 16);
}

static uint16_t to_bfloat16(float value) {
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40u); /* not a number stays so */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static float from_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
    if (exponent == 0x1fu)
        return of_bits(sign | 0x7f800000u | (mantissa << 13));
    if (exponent)
        return of_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    float value = (float)mantissa * 0x1p-24f; /* exact */
    return sign ? -value : value;
}

static uint16_t to_float16(float value) {
    uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
    if (rest >= 0x477ff000u) /* 65520 and more are rounded to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (rest < 0x38800000u) { /* below 2^-14 halves are multiples of 2^-24: the sum rounds to one, half to even */
        uint32_t magnitude = bits_of(of_bits(rest) + 0.5f) - bits_of(0.5f);
        return (uint16_t)(sign | magnitude);
    }
    rest += 0xfffu + ((rest >> 13) & 1u);
    return (uint16_t)(sign | ((rest - 0x38000000u) >> 13));
}

/* `source`, multiplied by `factor` unless that is below 0, in the dtype of the sum. */
void to_wide(void *target, int64_t target_type, const void *source, int64_t source_type, int64_t size, double factor) {
    if (target_type == FLOAT64) {
        double *out = target;
        const double *in = source;
        if (factor < 0)
            memcpy(out, in, (size_t)size * 8);
        else
            for (int64_t i = 0; i < size; i++)
                out[i] = in[i] * factor;
        return;
    }
    float *out = target, single = (float)factor;
    if (source_type == FLOAT32) {
        const float *in = source;
        if (factor < 0)
            memcpy(out, in, (size_t)size * 4);
        else
            for (int64_t i = 0; i < size; i++)
                out[i] = in[i] * single;
        return;
    }
    const uint16_t *in = source;
    if (source_type == BFLOAT16)
        for (int64_t i = 0; i < size; i++)
            out[i] = from_bfloat16(in[i]);
    else
        for (int64_t i = 0; i < size; i++)
            out[i] = from_float16(in[i]);
    if (factor >= 0)
        for (int64_t i = 0; i < size; i++)
            out[i] *= single;
}

void from_wide(void *target, int64_t target_type, const void *source, int64_t source_type, int64_t size) {
    if (target_type == source_type) {
        memcpy(target, source, (size_t)(size * item_bytes(source_type)));
        return;
    }
    const float *in = source;
    uint16_t *out = target;
    if (target_type == BFLOAT16)
        for (int64_t i = 0; i < size; i++)
            out[i] = to_bfloat16(in[i]);
    else
        for (int64_t i = 0; i < size; i++)
            out[i] = to_float16(in[i]);
}

/* target = (first + second) * factor. Ranks that each compute the same sum give the same two in the same order: of two
 * that are no numbers the processor keeps the bits of one. */
void add(void *target, const void *first, const void *second, int64_t type, int64_t size, double factor) {
    if (type == FLOAT64) {
        double *out = target;
        const double *a = first, *b = second;
        if (factor == 1.0)
            for (int64_t i = 0; i < size; i++)
                out[i] = a[i] + b[i];
        else
            for (int64_t i = 0; i < size; i++)
                out[i] = (a[i] + b[i]) * factor;
        return;
    }
    float *out = target, single = (float)factor;
    const float *a = first, *b = second;
    if (factor == 1.0)
        for (int64_t i = 0; i < size; i++)
            out[i] = a[i] + b[i];
    else
        for (int64_t i = 0; i < size; i++)
            out[i] = (a[i] + b[i]) * single;
}

void scale(void *target, int64_t type, int64_t size, double factor) {
    if (type == FLOAT64) {
        double *out = target;
        for (int64_t i = 0; i < size; i++)
            out[i] *= factor;
        return;
    }
    float *out = target, single = (float)factor;
    for (int64_t i = 0; i < size; i++)
        out[i] *= single;
}

/* Whether all are numbers, and none infinite: in these the exponent has all its bits. */
int is_finite(const void *array, int64_t type, int64_t size) {
    if (type == FLOAT64) {
        const char *in = array;
        uint64_t found = 0, bits;
        for (int64_t i = 0; i < size; i++) {
            memcpy(&bits, in + 8 * i, 8);
            found |= (bits & 0x7ff0000000000000u) == 0x7ff0000000000000u;
        }
        return !found;
    }
    const float *in = array;
    uint32_t found = 0;
    for (int64_t i = 0; i < size; i++)
        found |= (bits_of(in[i]) & 0x7f800000u) == 0x7f800000u;
    return !found;
}
