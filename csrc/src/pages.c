/* Packs pages of a KV cache and unpacks them, on the CPU. */
#include "pages_math.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

typedef struct {
    const kite_page_layout *layout;
    const kite_page_item *items;
    kite_page_result *results;
    uint64_t token_bytes; /* of all segments */
    uint64_t num_items, parts, num_units, batch;
    uint64_t next;   /* the first unit that no thread has taken */
    int64_t status;  /* a bad one, if there was any */
    int unpack, sum; /* whether the units add to the checksums */
} job;

uint32_t kite_pages_abi(void) { return KITE_PAGES_ABI; }

/* ---- checksum ---- */

CLONES static uint64_t sum_words(const uint8_t *bytes, uint64_t num_words, uint64_t index) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < num_words; i++) {
        uint64_t word;
        memcpy(&word, bytes + 8 * i, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
#endif
        sum += kite_word(word, index + i);
    }
    return sum;
}

/* Sum of the words that start in `bytes`, which is at `offset`, a multiple of 8, of the packed bytes. */
static uint64_t sum_range(const uint8_t *bytes, uint64_t num_bytes, uint64_t offset) {
    uint64_t sum = sum_words(bytes, num_bytes / 8, offset / 8), word = 0;
    for (uint64_t i = num_bytes / 8 * 8; i < num_bytes; i++) word |= (uint64_t)bytes[i] << 8 * (i % 8);
    return num_bytes % 8 ? sum + kite_word(word, (offset + num_bytes) / 8) : sum;
}

uint64_t kite_checksum(const uint8_t *bytes, uint64_t num_bytes) {
    return kite_sum_end(sum_range(bytes, num_bytes, 0), num_bytes);
}

/* ---- byte planes ---- */

CLONES static void split2(const uint8_t *data, uint8_t *low, uint8_t *high, uint64_t num) {
    for (uint64_t i = 0; i < num; i++) {
        low[i] = data[2 * i];
        high[i] = data[2 * i + 1];
    }
}

CLONES static void join2(const uint8_t *low, const uint8_t *high, uint8_t *data, uint64_t num) {
    for (uint64_t i = 0; i < num; i++) {
        data[2 * i] = low[i];
        data[2 * i + 1] = high[i];
    }
}

static void split(const uint8_t *data, uint8_t *planes, uint64_t stride, uint64_t num, uint64_t item_bytes) {
    if (item_bytes == 2) {
        split2(data, planes, planes + stride, num);
        return;
    }
    for (uint64_t plane = 0; plane < item_bytes; plane++)
        for (uint64_t i = 0; i < num; i++) planes[plane * stride + i] = data[i * item_bytes + plane];
}

static void join(const uint8_t *planes, uint8_t *data, uint64_t stride, uint64_t num, uint64_t item_bytes) {
    if (item_bytes == 2) {
        join2(planes, planes + stride, data, num);
        return;
    }
    for (uint64_t plane = 0; plane < item_bytes; plane++)
        for (uint64_t i = 0; i < num; i++) data[i * item_bytes + plane] = planes[plane * stride + i];
}

/* ---- 8-bit forms ---- */

CLONES static void raise_highest(const uint16_t *data, uint16_t *highest, uint64_t num) {
    for (uint64_t i = 0; i < num; i++) {
        const uint16_t magnitude = data[i] & 0x7FFFu;
        highest[i] = highest[i] > magnitude ? highest[i] : magnitude;
    }
}

CLONES static uint16_t highest_of(const uint16_t *data, uint64_t num) {
    uint16_t highest = 0;
    for (uint64_t i = 0; i < num; i++) {
        const uint16_t magnitude = data[i] & 0x7FFFu;
        highest = highest > magnitude ? highest : magnitude;
    }
    return highest;
}

/* One loop per form and kind, so that each is compiled without branches. A step of 0 in `scales` means one for all. */
#define EACH_FORM(loop)                                                              \
    if (kind == KITE_BFLOAT16 && form == KITE_INT8) loop(KITE_BFLOAT16, KITE_INT8)   \
    else if (kind == KITE_BFLOAT16) loop(KITE_BFLOAT16, KITE_FP8)                    \
    else if (form == KITE_INT8) loop(KITE_FLOAT16, KITE_INT8)                        \
    else loop(KITE_FLOAT16, KITE_FP8)

CLONES static void quantize_each(const uint16_t *data, const uint16_t *scales, uint8_t *codes, uint64_t num,
                                 int32_t kind, int32_t form) {
#define LOOP(K, F) \
    for (uint64_t i = 0; i < num; i++) codes[i] = kite_quantize(kite_widen(data[i], K), kite_widen(scales[i], K), F);
    EACH_FORM(LOOP)
#undef LOOP
}

CLONES static void quantize_all(const uint16_t *data, uint16_t scale, uint8_t *codes, uint64_t num, int32_t kind,
                                int32_t form) {
    const float wide = kite_widen(scale, kind);
#define LOOP(K, F) \
    for (uint64_t i = 0; i < num; i++) codes[i] = kite_quantize(kite_widen(data[i], K), wide, F);
    EACH_FORM(LOOP)
#undef LOOP
}

CLONES static void restore_each(const uint8_t *codes, const uint16_t *scales, uint16_t *data, uint64_t num,
                                int32_t kind, int32_t form) {
#define LOOP(K, F) \
    for (uint64_t i = 0; i < num; i++) data[i] = kite_narrow(kite_restore(codes[i], kite_widen(scales[i], K), F), K);
    EACH_FORM(LOOP)
#undef LOOP
}

CLONES static void restore_all(const uint8_t *codes, uint16_t scale, uint16_t *data, uint64_t num, int32_t kind,
                               int32_t form) {
    const float wide = kite_widen(scale, kind);
#define LOOP(K, F) \
    for (uint64_t i = 0; i < num; i++) data[i] = kite_narrow(kite_restore(codes[i], wide, F), K);
    EACH_FORM(LOOP)
#undef LOOP
}

CLONES static int all_codes(const uint8_t *codes, uint64_t num, int32_t form) {
    int good = 1;
    for (uint64_t i = 0; i < num; i++) good &= kite_is_code(codes[i], form);
    return good;
}

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Scales, then codes of one segment; returns whether all values are finite. */
static int quantize_segment(const uint16_t *data, uint8_t *packed, const kite_lossy *at, uint64_t tokens,
                            const kite_page_layout *layout) {
    uint16_t *scales = (uint16_t *)(packed + at->scale_start);
    uint8_t *codes = packed + at->code_start;
    const uint64_t channels = at->channels, num_scales = at->groups ? tokens * at->groups : channels;
    if (!at->groups) {
        memset(scales, 0, 2 * channels);
        for (uint64_t token = 0; token < tokens; token++) raise_highest(data + token * channels, scales, channels);
    }
    for (uint64_t token = 0; token < tokens && at->groups; token++)
        for (uint64_t group = 0; group < at->groups; group++)
            scales[token * at->groups + group] = highest_of(data + token * channels + group * KITE_GROUP,
                                                            smaller(KITE_GROUP, channels - group * KITE_GROUP));
    if (highest_of(scales, num_scales) >= kite_infinity(layout->kind)) return 0;
    for (uint64_t token = 0; token < tokens; token++) {
        const uint64_t start = token * channels;
        if (!at->groups) quantize_each(data + start, scales, codes + start, channels, layout->kind, layout->form);
        for (uint64_t group = 0; group < at->groups; group++) {
            const uint64_t from = start + group * KITE_GROUP;
            quantize_all(data + from, scales[token * at->groups + group], codes + from,
                         smaller(KITE_GROUP, channels - group * KITE_GROUP), layout->kind, layout->form);
        }
    }
    return 1;
}

/* The inverse; returns whether an encoder can have written it. */
static int restore_segment(const uint8_t *packed, uint16_t *data, const kite_lossy *at, uint64_t tokens,
                           const kite_page_layout *layout) {
    const uint16_t *scales = (const uint16_t *)(packed + at->scale_start);
    const uint8_t *codes = packed + at->code_start;
    const uint64_t channels = at->channels, num_scales = at->groups ? tokens * at->groups : channels;
    for (uint64_t i = 0; i < num_scales; i++)
        if (scales[i] >= kite_infinity(layout->kind) && scales[i] != 0x8000u) return 0;
    if (!all_codes(codes, tokens * channels, layout->form)) return 0;
    for (uint64_t token = 0; token < tokens; token++) {
        const uint64_t start = token * channels;
        if (!at->groups) restore_each(codes + start, scales, data + start, channels, layout->kind, layout->form);
        for (uint64_t group = 0; group < at->groups; group++) {
            const uint64_t from = start + group * KITE_GROUP;
            restore_all(codes + from, scales[token * at->groups + group], data + from,
                        smaller(KITE_GROUP, channels - group * KITE_GROUP), layout->kind, layout->form);
        }
    }
    return 1;
}

static int head_is(const uint8_t *packed, int32_t form) {
    const uint8_t head[KITE_HEAD_BYTES] = {0, form == KITE_FP8};
    return !memcmp(packed, head, KITE_HEAD_BYTES);
}

static void write_head(uint8_t *packed, int32_t form) {
    memset(packed, 0, KITE_HEAD_BYTES);
    packed[1] = form == KITE_FP8;
}

/* ---- units of work: some segments of one item ---- */

static void add_sum(job *work, uint64_t item, const uint8_t *packed, uint64_t from, uint64_t to) {
    if (work->sum)
        __atomic_fetch_add(&work->results[item].checksum, sum_range(packed + from, to - from, from), __ATOMIC_RELAXED);
}

static void set_status(job *work, uint64_t item, int64_t status) {
    __atomic_store_n(&work->status, status, __ATOMIC_RELAXED);
    if (work->results) __atomic_store_n(&work->results[item].status, status, __ATOMIC_RELAXED);
}

static void copy_raw(job *work, uint64_t index, uint64_t from, uint64_t to) {
    const kite_page_item *item = work->items + index;
    const kite_page_segment *segments = work->layout->segments;
    const int whole = item->tokens == work->layout->block_tokens;
    for (uint64_t i = from; i < to;) {
        const kite_page_segment *each = segments + i;
        uint8_t *page = each->base + item->block * each->block_stride + item->first * each->token_bytes;
        uint8_t *packed = item->packed + each->before * item->tokens;
        uint64_t num_bytes = each->token_bytes * item->tokens;
        /* Whole segments that follow each other in the cache, as in one arena for all layers, go in one piece. */
        for (i++; whole && i < to; i++) {
            const kite_page_segment *next = segments + i;
            if (next->block_stride != each->block_stride || next->base != each->base + num_bytes) break;
            num_bytes += next->token_bytes * item->tokens;
        }
        memcpy(work->unpack ? page : packed, work->unpack ? packed : page, num_bytes);
        add_sum(work, index, item->packed, (uint64_t)(packed - item->packed),
                (uint64_t)(packed - item->packed) + num_bytes);
    }
}

static void copy_planes(job *work, uint64_t index, uint64_t from, uint64_t to) {
    const kite_page_item *item = work->items + index;
    const uint64_t item_bytes = work->layout->item_bytes, plane = work->token_bytes * item->tokens / item_bytes;
    for (uint64_t i = from; i < to; i++) {
        const kite_page_segment *each = work->layout->segments + i;
        uint8_t *page = each->base + item->block * each->block_stride + item->first * each->token_bytes;
        const uint64_t start = each->before * item->tokens / item_bytes;
        const uint64_t num = each->token_bytes * item->tokens / item_bytes;
        if (work->unpack) join(item->packed + start, page, plane, num, item_bytes);
        else split(page, item->packed + start, plane, num, item_bytes);
        for (uint64_t p = 0; p < item_bytes && work->sum; p++)
            add_sum(work, index, item->packed, p * plane + start, p * plane + start + num);
    }
}

static void copy_lossy(job *work, uint64_t index, uint64_t from, uint64_t to) {
    const kite_page_layout *layout = work->layout;
    const kite_page_item *item = work->items + index;
    if (!work->unpack && !from) write_head(item->packed, layout->form);
    if (work->unpack && !head_is(item->packed, layout->form)) {
        set_status(work, index, KITE_DAMAGED);
        return;
    }
    for (uint64_t i = from; i < to; i++) {
        const kite_page_segment *each = layout->segments + i;
        uint16_t *page =
            (uint16_t *)(each->base + item->block * each->block_stride + item->first * each->token_bytes);
        const kite_lossy at = kite_lossy_place(i, layout->num_segments, each->token_bytes, item->tokens);
        const int good = work->unpack ? restore_segment(item->packed, page, &at, item->tokens, layout)
                                      : quantize_segment(page, item->packed, &at, item->tokens, layout);
        if (!good) set_status(work, index, work->unpack ? KITE_DAMAGED : KITE_NOT_FINITE);
    }
}

static void copy_units(void *data) {
    job *work = data;
    const uint64_t num_segments = work->layout->num_segments;
    for (;;) {
        const uint64_t start = __atomic_fetch_add(&work->next, work->batch, __ATOMIC_RELAXED);
        if (start >= work->num_units) return;
        for (uint64_t unit = start; unit < smaller(start + work->batch, work->num_units); unit++) {
            const uint64_t index = unit / work->parts, part = unit % work->parts;
            const uint64_t from = part * num_segments / work->parts, to = (part + 1) * num_segments / work->parts;
            if (work->layout->form == KITE_RAW) copy_raw(work, index, from, to);
            else if (work->layout->form == KITE_PLANES) copy_planes(work, index, from, to);
            else copy_lossy(work, index, from, to);
        }
    }
}

static void sum_units(void *data) {
    job *work = data;
    for (;;) {
        const uint64_t index = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (index >= work->num_items) return;
        work->results[index].checksum = sum_range(work->items[index].packed, work->items[index].packed_bytes, 0);
    }
}

static void run_job(job *work, void (*function)(void *), uint64_t num_units, kite_runner runner, uint32_t threads) {
    work->next = 0;
    if (runner && threads > 1 && num_units > 1) runner(function, work, (unsigned)smaller(threads, num_units), 0);
    else function(work);
}

/* Whether every unit starts and ends at a word of the packed bytes, so that it can sum what it has just copied. */
static int words_are_whole(const kite_page_layout *layout) {
    const uint64_t unit = layout->form == KITE_PLANES ? 8 * layout->item_bytes : 8;
    for (uint64_t i = 0; i < layout->num_segments; i++)
        if (layout->segments[i].token_bytes % unit) return 0;
    return layout->form < KITE_INT8;
}

static int64_t move_pages(const kite_page_layout *layout, const kite_page_item *items, uint64_t num_items,
                          kite_page_result *results, kite_runner runner, uint32_t threads, int unpack) {
    const uint64_t token_bytes = layout ? kite_token_bytes(layout) : 0;
    if (!token_bytes || (num_items && !items) || num_items > 1u << 24) return KITE_BAD_ARGUMENT;
    if (!kite_items_fit(layout, token_bytes, items, num_items)) return KITE_BAD_ARGUMENT;
    if (!num_items) return 0;
    threads = threads > 1024 ? 1024 : threads < 1 ? 1 : threads;
    job work = {.layout = layout, .items = items, .results = results, .token_bytes = token_bytes};
    work.num_items = num_items;
    work.unpack = unpack;
    work.sum = results && words_are_whole(layout);
    /* About four units per thread: enough to share the work evenly, few enough to keep the pieces long. */
    const uint64_t wanted = runner && threads > 1 ? 4 * (uint64_t)threads : 1;
    work.parts = smaller(layout->num_segments, (wanted + num_items - 1) / num_items);
    work.num_units = num_items * work.parts;
    work.batch = smaller(64, (work.num_units + wanted - 1) / wanted);
    if (results) memset(results, 0, num_items * sizeof *results);
    run_job(&work, copy_units, work.num_units, runner, threads);
    if (results && !work.sum) run_job(&work, sum_units, num_items, runner, threads);
    for (uint64_t i = 0; results && i < num_items; i++)
        results[i].checksum = kite_sum_end(results[i].checksum, items[i].packed_bytes);
    return work.status;
}

uint64_t kite_page_bytes(const kite_page_layout *layout, uint32_t tokens) {
    const uint64_t token_bytes = layout ? kite_token_bytes(layout) : 0;
    if (!token_bytes || tokens < 1 || tokens > layout->block_tokens) return 0;
    return kite_form_bytes(layout, token_bytes, tokens);
}

int64_t kite_pack_pages(const kite_page_layout *layout, const kite_page_item *items, uint64_t num_items,
                        kite_page_result *results, kite_runner runner, uint32_t threads) {
    return move_pages(layout, items, num_items, results, runner, threads, 0);
}

int64_t kite_unpack_pages(const kite_page_layout *layout, const kite_page_item *items, uint64_t num_items,
                          kite_page_result *results, kite_runner runner, uint32_t threads) {
    return move_pages(layout, items, num_items, results, runner, threads, 1);
}
