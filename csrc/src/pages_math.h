/* Arithmetic of the packed forms, the same on CPU and GPU. No function may be compiled with fused multiply-add or with
 * denormals flushed: every machine has to give the same bytes. */
#ifndef KITE_PAGES_MATH_H
#define KITE_PAGES_MATH_H

#include <string.h>

#include "../include/kite_pages.h"

#ifndef KITE_FN
#if defined(__CUDACC__)
#define KITE_FN static __host__ __device__ __forceinline__
#else
#define KITE_FN static inline
#endif
#endif

#define KITE_KEY 0x9E3779B97F4A7C15ull
#define KITE_LENGTH_KEY 0xD6E8FEB86659FD93ull
#define KITE_GROUP 64         /* channels that share a scale */
#define KITE_CHANNEL_TOKENS 8 /* K has scales per channel from so many tokens on */
#define KITE_HEAD_BYTES 8
#define KITE_ROUND 12582912.0f /* 1.5 * 2^23: adding it rounds a float below 2^22 to an integer, ties to even */

KITE_FN uint64_t kite_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* What word `index` adds to a checksum before the last step. */
KITE_FN uint64_t kite_word(uint64_t word, uint64_t index) { return kite_mix(word ^ ((index + 1) * KITE_KEY)); }

KITE_FN uint64_t kite_sum_end(uint64_t sum, uint64_t num_bytes) { return kite_mix(sum + num_bytes * KITE_LENGTH_KEY); }

KITE_FN uint32_t kite_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

KITE_FN float kite_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* A 16-bit float as float32, exactly. Infinities and NaN of float16 come out as other numbers. */
KITE_FN float kite_widen(uint16_t half, int32_t kind) {
    if (kind == KITE_BFLOAT16) return kite_float((uint32_t)half << 16);
    const uint32_t magnitude = half & 0x7FFFu, sign = (uint32_t)(half & 0x8000u) << 16;
    const float small = (float)(int32_t)magnitude * 0x1p-24f;
    const uint32_t bits = magnitude < 0x400u ? kite_bits(small) : (magnitude << 13) + (112u << 23);
    return kite_float(bits | sign);
}

/* The nearest 16-bit float of a finite float32, ties to even. */
KITE_FN uint16_t kite_narrow(float value, int32_t kind) {
    const uint32_t bits = kite_bits(value);
    if (kind == KITE_BFLOAT16) return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = ((magnitude + 0xFFFu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10);
    const uint32_t small = kite_bits(kite_float(magnitude < 0x38800000u ? magnitude : 0u) * 0x1p24f + KITE_ROUND) & 0x7FFu;
    const uint32_t finite = magnitude < 0x38800000u ? small : normal;
    return (uint16_t)((magnitude >= 0x47800000u ? 0x7C00u : finite) | (bits >> 16 & 0x8000u));
}

/* Bits of the smallest magnitude that is not finite. */
KITE_FN uint16_t kite_infinity(int32_t kind) { return kind == KITE_BFLOAT16 ? 0x7F80u : 0x7C00u; }

/* The stored byte of an element; `scale` is at least its magnitude. */
KITE_FN uint8_t kite_quantize(float value, float scale, int32_t form) {
    const float share = scale > 0.0f ? value / scale : 0.0f;
    if (form == KITE_INT8) return (uint8_t)kite_bits(share * 127.0f + KITE_ROUND);
    const float wide = share * 448.0f;
    const uint32_t bits = kite_bits(wide), magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
    const uint32_t small = kite_bits(kite_float(magnitude < 0x3C800000u ? magnitude : 0u) * 0x1p9f + KITE_ROUND) & 0xFu;
    return (uint8_t)((magnitude < 0x3C800000u ? small : normal) | (bits >> 24 & 0x80u));
}

/* The element that a stored byte stands for, as float32. */
KITE_FN float kite_restore(uint8_t code, float scale, int32_t form) {
    if (form == KITE_INT8) return (float)(int32_t)(int8_t)code / 127.0f * scale;
    const uint32_t magnitude = code & 0x7Fu;
    const float small = (float)(int32_t)magnitude * 0x1p-9f;
    const uint32_t bits = magnitude < 8u ? kite_bits(small) : (magnitude << 20) + (120u << 23);
    return kite_float(bits | (uint32_t)(code & 0x80u) << 24) / 448.0f * scale;
}

/* Whether an encoder writes such a byte. */
KITE_FN int kite_is_code(uint8_t code, int32_t form) {
    return form == KITE_INT8 ? code != 0x80u : (code & 0x7Fu) != 0x7Fu;
}

/* Where the parts of one segment are in a lossy form; all in bytes from its start. */
typedef struct {
    uint64_t channels;    /* per token */
    uint64_t groups;      /* scales per token; 0 if each channel has one for all tokens */
    uint64_t scale_start; /* 16-bit floats */
    uint64_t code_start;
    uint64_t code_base; /* where the codes of the first segment are */
    uint64_t bytes;     /* of all */
} kite_lossy;

KITE_FN kite_lossy kite_lossy_place(uint64_t segment, uint64_t num_segments, uint64_t token_bytes, uint64_t tokens) {
    kite_lossy at;
    const uint64_t keys = num_segments / 2, groups = (token_bytes / 2 + KITE_GROUP - 1) / KITE_GROUP;
    const int by_channel = tokens >= KITE_CHANNEL_TOKENS;
    const uint64_t key_scales = by_channel ? token_bytes / 2 : tokens * groups, value_scales = tokens * groups;
    const uint64_t own_keys = segment < keys ? segment : keys;
    at.channels = token_bytes / 2;
    at.groups = by_channel && segment < keys ? 0 : groups;
    at.scale_start = KITE_HEAD_BYTES + 2 * (own_keys * key_scales + (segment - own_keys) * value_scales);
    at.code_base = KITE_HEAD_BYTES + 2 * (keys * key_scales + (num_segments - keys) * value_scales);
    at.code_start = at.code_base + segment * tokens * at.channels;
    at.bytes = at.code_base + num_segments * tokens * at.channels;
    return at;
}

/* Bytes of a token in all segments; 0 for a layout that makes no sense. */
KITE_FN uint64_t kite_token_bytes(const kite_page_layout *layout) {
    uint64_t total = 0;
    const uint32_t item = layout->item_bytes;
    if (!layout->segments || layout->num_segments < 1 || layout->num_segments > 65535) return 0;
    if (item != 1 && item != 2 && item != 4 && item != 8) return 0;
    if (layout->form < KITE_RAW || layout->form > KITE_FP8) return 0;
    if (layout->num_blocks < 1 || layout->block_tokens < 1 || layout->block_tokens > 65536) return 0;
    const int lossy = layout->form >= KITE_INT8;
    if (lossy && (item != 2 || (layout->kind != KITE_BFLOAT16 && layout->kind != KITE_FLOAT16))) return 0;
    for (uint64_t i = 0; i < layout->num_segments; i++) {
        const kite_page_segment *each = layout->segments + i;
        if (!each->base || each->token_bytes < 1 || each->token_bytes > (1u << 26)) return 0;
        if (each->token_bytes % item || each->before != total) return 0;
        if (layout->num_blocks > 1 && each->block_stride < each->token_bytes * layout->block_tokens) return 0;
        if (lossy && (each->token_bytes != layout->segments->token_bytes || (uintptr_t)each->base % 2 ||
                      each->block_stride % 2))
            return 0;
        total += each->token_bytes;
    }
    return total;
}

/* Bytes of an item in the layout's form. */
KITE_FN uint64_t kite_form_bytes(const kite_page_layout *layout, uint64_t token_bytes, uint64_t tokens) {
    if (layout->form < KITE_INT8) return token_bytes * tokens;
    return kite_lossy_place(0, layout->num_segments, layout->segments->token_bytes, tokens).bytes;
}

/* Whether every item fits a layout whose tokens have `token_bytes` bytes. */
KITE_FN int kite_items_fit(const kite_page_layout *layout, uint64_t token_bytes, const kite_page_item *items,
                           uint64_t num_items) {
    for (uint64_t i = 0; i < num_items; i++) {
        const kite_page_item *item = items + i;
        if (item->block >= layout->num_blocks || item->tokens < 1 || !item->packed) return 0;
        if (item->first > layout->block_tokens || item->tokens > layout->block_tokens - item->first) return 0;
        if (item->packed_bytes != kite_form_bytes(layout, token_bytes, item->tokens)) return 0;
        if (layout->form >= KITE_INT8 && (uintptr_t)item->packed % 2) return 0;
    }
    return 1;
}

#endif
