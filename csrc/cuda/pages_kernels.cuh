/* Kernels that pack and unpack pages: block (x, y) of threads has segment x of item y. They use nothing but block-wide
 * barriers, shared memory and one atomic add, so that csrc/tests/ can run them on a CPU. */
#ifndef KITE_PAGES_KERNELS_CUH
#define KITE_PAGES_KERNELS_CUH

#include "../src/pages_math.h"

#define KITE_THREADS 256
#define KITE_BATCH 64 /* items of one launch: they travel as its argument, which may have 4 KiB */

struct kite_batch {
    kite_page_item items[KITE_BATCH];
};

struct kite_geometry {
    const kite_page_segment *segments;
    uint64_t token_bytes; /* of all segments */
    uint32_t num_segments, item_bytes;
    int32_t kind, form;
};

struct alignas(16) kite_vector {
    uint64_t words[2];
};

/* Bytes 0 and 2 of a word's four pairs, then bytes 1 and 3: as two halves. */
static __device__ __forceinline__ void kite_split_word(uint64_t pairs, uint32_t *low, uint32_t *high) {
    const uint64_t even = pairs & 0x00FF00FF00FF00FFull, odd = (pairs >> 8) & 0x00FF00FF00FF00FFull;
    const uint64_t even2 = (even | (even >> 8)) & 0x0000FFFF0000FFFFull;
    const uint64_t odd2 = (odd | (odd >> 8)) & 0x0000FFFF0000FFFFull;
    *low = (uint32_t)(even2 | (even2 >> 16));
    *high = (uint32_t)(odd2 | (odd2 >> 16));
}

static __device__ __forceinline__ uint64_t kite_join_word(uint32_t low, uint32_t high) {
    uint64_t even = low, odd = high;
    even = (even | (even << 16)) & 0x0000FFFF0000FFFFull;
    odd = (odd | (odd << 16)) & 0x0000FFFF0000FFFFull;
    even = (even | (even << 8)) & 0x00FF00FF00FF00FFull;
    odd = (odd | (odd << 8)) & 0x00FF00FF00FF00FFull;
    return even | (odd << 8);
}

/* Adds the threads' sums to *total. */
static __device__ __forceinline__ void kite_add_sums(uint64_t sum, uint64_t *total) {
    __shared__ uint64_t sums[KITE_THREADS];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned half = KITE_THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (!threadIdx.x) atomicAdd((unsigned long long *)total, (unsigned long long)sums[0]);
}

static __device__ __forceinline__ uint8_t *kite_page(const kite_page_segment *segment, const kite_page_item *item) {
    return segment->base + item->block * segment->block_stride + item->first * segment->token_bytes;
}

/* KITE_RAW. VECTORS: every segment and item is aligned to 16 bytes; only then may `results` be given. */
template <int UNPACK, int VECTORS>
__global__ void __launch_bounds__(KITE_THREADS)
kite_raw_kernel(const kite_geometry shape, const kite_batch batch, kite_page_result *results) {
    const kite_page_segment segment = shape.segments[blockIdx.x];
    const kite_page_item *item = batch.items + blockIdx.y;
    const uint64_t num_bytes = segment.token_bytes * item->tokens, offset = segment.before * item->tokens;
    uint8_t *page = kite_page(&segment, item), *packed = item->packed + offset;
    const uint8_t *from = UNPACK ? packed : page;
    uint8_t *to = UNPACK ? page : packed;
    if (!VECTORS) {
        for (uint64_t i = threadIdx.x; i < num_bytes; i += KITE_THREADS) to[i] = from[i];
        return;
    }
    const kite_vector *source = (const kite_vector *)from;
    kite_vector *target = (kite_vector *)to;
    const uint64_t num = num_bytes / 16;
    uint64_t sum = 0;
    for (uint64_t start = threadIdx.x; start < num; start += 4 * KITE_THREADS) {
        kite_vector held[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (start + k * KITE_THREADS < num) held[k] = source[start + k * KITE_THREADS];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint64_t i = start + k * KITE_THREADS;
            if (i >= num) break;
            target[i] = held[k];
            if (results) sum += kite_word(held[k].words[0], offset / 8 + 2 * i);
            if (results) sum += kite_word(held[k].words[1], offset / 8 + 2 * i + 1);
        }
    }
    if (results) kite_add_sums(sum, &results[blockIdx.y].checksum);
}

/* KITE_PLANES. VECTORS: elements of 2 bytes, and every segment has its data and planes aligned to 16 bytes. */
template <int UNPACK, int VECTORS>
__global__ void __launch_bounds__(KITE_THREADS) kite_planes_kernel(const kite_geometry shape, const kite_batch batch) {
    const kite_page_segment segment = shape.segments[blockIdx.x];
    const kite_page_item *item = batch.items + blockIdx.y;
    const uint64_t item_bytes = shape.item_bytes, plane = shape.token_bytes * item->tokens / item_bytes;
    const uint64_t num_bytes = segment.token_bytes * item->tokens;
    uint8_t *page = kite_page(&segment, item), *packed = item->packed + segment.before * item->tokens / item_bytes;
    if (!VECTORS) {
        for (uint64_t i = threadIdx.x; i < num_bytes; i += KITE_THREADS) {
            uint8_t *at = packed + i % item_bytes * plane + i / item_bytes;
            if (UNPACK) page[i] = *at;
            else *at = page[i];
        }
        return;
    }
    kite_vector *pairs = (kite_vector *)page, *low = (kite_vector *)packed, *high = (kite_vector *)(packed + plane);
    for (uint64_t i = threadIdx.x; i < num_bytes / 32; i += KITE_THREADS) {
        uint32_t halves[2][4];
        if (UNPACK) {
            const kite_vector lows = low[i], highs = high[i];
            for (int k = 0; k < 4; k++) {
                halves[0][k] = (uint32_t)(lows.words[k / 2] >> 32 * (k % 2));
                halves[1][k] = (uint32_t)(highs.words[k / 2] >> 32 * (k % 2));
            }
            kite_vector first, second;
            for (int k = 0; k < 2; k++) {
                first.words[k] = kite_join_word(halves[0][k], halves[1][k]);
                second.words[k] = kite_join_word(halves[0][2 + k], halves[1][2 + k]);
            }
            pairs[2 * i] = first;
            pairs[2 * i + 1] = second;
        } else {
            const kite_vector first = pairs[2 * i], second = pairs[2 * i + 1];
            for (int k = 0; k < 2; k++) {
                kite_split_word(first.words[k], &halves[0][k], &halves[1][k]);
                kite_split_word(second.words[k], &halves[0][2 + k], &halves[1][2 + k]);
            }
            kite_vector lows, highs;
            for (int k = 0; k < 2; k++) {
                lows.words[k] = halves[0][2 * k] | (uint64_t)halves[0][2 * k + 1] << 32;
                highs.words[k] = halves[1][2 * k] | (uint64_t)halves[1][2 * k + 1] << 32;
            }
            low[i] = lows;
            high[i] = highs;
        }
    }
}

static __device__ __forceinline__ uint64_t kite_scale_of(const kite_lossy *at, uint64_t element) {
    const uint64_t token = element / at->channels, channel = element % at->channels;
    return at->groups ? token * at->groups + channel / KITE_GROUP : channel;
}

/* KITE_INT8 and KITE_FP8. VECTORS: 8 elements share a group, and data and codes are aligned to 16 and 8 bytes. */
template <int VECTORS>
__global__ void __launch_bounds__(KITE_THREADS)
kite_quantize_kernel(const kite_geometry shape, const kite_batch batch, kite_page_result *results) {
    const kite_page_segment segment = shape.segments[blockIdx.x];
    const kite_page_item *item = batch.items + blockIdx.y;
    const uint64_t tokens = item->tokens;
    const kite_lossy at = kite_lossy_place(blockIdx.x, shape.num_segments, segment.token_bytes, tokens);
    const uint16_t *data = (const uint16_t *)kite_page(&segment, item);
    uint16_t *scales = (uint16_t *)(item->packed + at.scale_start);
    uint8_t *codes = item->packed + at.code_start;
    if (!blockIdx.x && threadIdx.x < KITE_HEAD_BYTES)
        item->packed[threadIdx.x] = threadIdx.x == 1 && shape.form == KITE_FP8;
    const uint64_t num_scales = at.groups ? tokens * at.groups : at.channels;
    for (uint64_t i = threadIdx.x; i < num_scales; i += KITE_THREADS) {
        const uint64_t group = at.groups ? i % at.groups : 0;
        const uint16_t *from = at.groups ? data + i / at.groups * at.channels + group * KITE_GROUP : data + i;
        const uint64_t left = at.channels - group * KITE_GROUP, step = at.groups ? 1 : at.channels;
        const uint64_t num = !at.groups ? tokens : left < KITE_GROUP ? left : KITE_GROUP;
        uint16_t highest = 0;
        for (uint64_t k = 0; k < num; k++) {
            const uint16_t magnitude = from[k * step] & 0x7FFFu;
            highest = highest > magnitude ? highest : magnitude;
        }
        scales[i] = highest;
        if (highest >= kite_infinity(shape.kind)) results[blockIdx.y].status = KITE_NOT_FINITE;
    }
    __syncthreads(); /* makes the scales, which are global memory, visible to the whole block too */
    const uint64_t num = tokens * at.channels;
    if (!VECTORS) {
        for (uint64_t i = threadIdx.x; i < num; i += KITE_THREADS)
            codes[i] = kite_quantize(kite_widen(data[i], shape.kind),
                                     kite_widen(scales[kite_scale_of(&at, i)], shape.kind), shape.form);
    }
    for (uint64_t i = threadIdx.x; VECTORS && i < num / 8; i += KITE_THREADS) {
        const kite_vector held = ((const kite_vector *)data)[i];
        const uint64_t scale = kite_scale_of(&at, 8 * i);
        uint64_t word = 0;
        for (int k = 0; k < 8; k++) {
            const uint16_t value = (uint16_t)(held.words[k / 4] >> 16 * (k % 4));
            const float spread = kite_widen(scales[at.groups ? scale : scale + k], shape.kind);
            word |= (uint64_t)kite_quantize(kite_widen(value, shape.kind), spread, shape.form) << 8 * k;
        }
        ((uint64_t *)codes)[i] = word;
    }
}

template <int VECTORS>
__global__ void __launch_bounds__(KITE_THREADS)
kite_restore_kernel(const kite_geometry shape, const kite_batch batch, kite_page_result *results) {
    const kite_page_segment segment = shape.segments[blockIdx.x];
    const kite_page_item *item = batch.items + blockIdx.y;
    const uint64_t tokens = item->tokens;
    const kite_lossy at = kite_lossy_place(blockIdx.x, shape.num_segments, segment.token_bytes, tokens);
    uint16_t *data = (uint16_t *)kite_page(&segment, item);
    const uint16_t *scales = (const uint16_t *)(item->packed + at.scale_start);
    const uint8_t *codes = item->packed + at.code_start;
    int good = 1;
    if (threadIdx.x < KITE_HEAD_BYTES)
        good = item->packed[threadIdx.x] == (threadIdx.x == 1 && shape.form == KITE_FP8);
    const uint64_t num_scales = at.groups ? tokens * at.groups : at.channels, num = tokens * at.channels;
    for (uint64_t i = threadIdx.x; i < num_scales; i += KITE_THREADS)
        good &= scales[i] < kite_infinity(shape.kind) || scales[i] == 0x8000u;
    for (uint64_t i = threadIdx.x; i < (VECTORS ? num / 8 : num); i += KITE_THREADS) {
        const uint64_t scale = kite_scale_of(&at, VECTORS ? 8 * i : i);
        if (!VECTORS) {
            good &= kite_is_code(codes[i], shape.form);
            data[i] = kite_narrow(kite_restore(codes[i], kite_widen(scales[scale], shape.kind), shape.form), shape.kind);
            continue;
        }
        const uint64_t word = ((const uint64_t *)codes)[i];
        kite_vector made = {{0, 0}};
        for (int k = 0; k < 8; k++) {
            const uint8_t code = (uint8_t)(word >> 8 * k);
            const float spread = kite_widen(scales[at.groups ? scale : scale + k], shape.kind);
            good &= kite_is_code(code, shape.form);
            const uint16_t value = kite_narrow(kite_restore(code, spread, shape.form), shape.kind);
            made.words[k / 4] |= (uint64_t)value << 16 * (k % 4);
        }
        ((kite_vector *)data)[i] = made;
    }
    if (!good) results[blockIdx.y].status = KITE_DAMAGED;
}

/* Adds the packed bytes to the checksums: gridDim.x blocks share an item. */
static __global__ void __launch_bounds__(KITE_THREADS) kite_sum_kernel(const kite_batch batch, kite_page_result *results) {
    const kite_page_item *item = batch.items + blockIdx.y;
    const uint64_t num_words = item->packed_bytes / 8, step = (uint64_t)gridDim.x * KITE_THREADS;
    const int whole = (uintptr_t)item->packed % 8 == 0;
    uint64_t sum = 0;
    for (uint64_t i = blockIdx.x * (uint64_t)KITE_THREADS + threadIdx.x; i <= num_words; i += step) {
        const uint64_t left = i < num_words ? 8 : item->packed_bytes % 8;
        uint64_t word = 0;
        if (!left) break;
        if (whole && left == 8) word = ((const uint64_t *)item->packed)[i];
        else for (uint64_t k = 0; k < left; k++) word |= (uint64_t)item->packed[8 * i + k] << 8 * k;
        sum += kite_word(word, i);
    }
    kite_add_sums(sum, &results[blockIdx.y].checksum);
}

static __global__ void kite_sum_end_kernel(const kite_batch batch, uint32_t num_items, kite_page_result *results) {
    const unsigned i = threadIdx.x;
    if (i < num_items) results[i].checksum = kite_sum_end(results[i].checksum, batch.items[i].packed_bytes);
}

#endif
