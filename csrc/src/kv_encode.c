/* Encoding: split every element into a symbol under a context and low bits, count, fit tables, code backwards. */
#include "kv.h"

/* Symbols that a table must serve before the next context gets its own; one token in so many is looked at for the
 * levels. */
enum { TABLE_COUNT = 512, SAMPLE_EVERY = 4 };

typedef struct {
    const kv_plan *plan;
    const kv_kernels *kernels;
    const uint16_t *data;
    int low;
    uint64_t escapes, most_escapes;
    uint8_t *priors;                /* one per segment */
    uint8_t *escaped, *escaped_end; /* exponents that have no level, in coding order */
    uint16_t *indices;              /* context * SYMBOLS + symbol, in coding order */
    uint32_t (*counts)[SYMBOLS];    /* per context, then per table; twice */
    uint32_t *codes;                /* per context and symbol: reciprocal; frequency and start */
    uint64_t starts; /* bit c: a table begins at context c */
} encoder;

static uint64_t most_escapes(const kv_plan *plan) { return plan->elements / 16 + 16; }

uint64_t kite_kv_encode_bound(const kite_kv_shape *shape) {
    kv_plan plan;
    if (!kv_make_plan(shape, &plan)) return 0;
    return HEAD_BYTES + plan.segments + CONTEXTS * MAX_TABLE_BYTES + most_escapes(&plan) + plan.low_bytes +
           STATE_BYTES + 2 * plan.elements + 64;
}

uint64_t kite_kv_encode_scratch(const kite_kv_shape *shape) {
    kv_plan plan;
    if (!kv_make_plan(shape, &plan)) return 0;
    return CONTEXTS * SYMBOLS * 16 + 2 * plan.elements;
}

static uint8_t prior_of(uint64_t sum, uint64_t count) { return (uint8_t)((sum * 8 + count / 2) / count); }

/* The window of LEVELS - 1 exponents that holds the most elements. */
static int fullest_window(const kv_plan *plan, const uint16_t *data) {
    uint32_t counts[256] = {0};
    for (uint64_t i = 0; i < plan->elements; i++) counts[(data[i] & 0x7fff) >> plan->kind]++;
    uint64_t inside = 0, most = 0;
    int low = 0;
    for (int i = 0; i < LEVELS - 1; i++) inside += counts[i];
    most = inside;
    for (int i = 1; i <= kv_max_low(plan->kind); i++) {
        inside += counts[i + LEVELS - 2];
        inside -= counts[i - 1];
        if (inside > most) {
            most = inside;
            low = i;
        }
    }
    return low;
}

/* Sets the priors; returns whether more than a 256th of the sample has no level. */
static int set_priors(encoder *coder) {
    const kv_plan *plan = coder->plan;
    uint64_t count = (plan->tokens + SAMPLE_EVERY - 1) / SAMPLE_EVERY * plan->channels, escapes = 0;
    for (uint64_t segment = 0; segment < plan->segments; segment++) {
        uint64_t sum = 0;
        for (uint64_t token = 0; token < plan->tokens; token += SAMPLE_EVERY)
            coder->kernels->measure(coder->data + (segment * plan->tokens + token) * plan->channels, plan->channels,
                                    plan->kind, coder->low, &sum, &escapes);
        coder->priors[segment] = prior_of(sum, count);
    }
    return escapes > plan->segments * count / 256;
}

/* Finds the levels' lowest exponent and the priors. */
static void choose_levels(encoder *coder) {
    const kv_plan *plan = coder->plan;
    int highest = coder->kernels->highest(coder->data, plan->elements, plan->kind);
    coder->low = highest < LEVELS - 1 ? 0 : highest - (LEVELS - 2);
    if (set_priors(coder)) {
        coder->low = fullest_window(plan, coder->data);
        set_priors(coder);
    }
}

/* Returns 0 if there are too many. */
static int note_escapes(encoder *coder, const uint16_t *row, const uint16_t *indices, uint32_t width, uint32_t number) {
    if (number > coder->most_escapes - coder->escapes) return 0;
    coder->escapes += number;
    for (uint32_t i = 0; i < width; i++)
        if (!(indices[i] >> 1 & (LEVELS - 1)))
            *coder->escaped_end++ = (uint8_t)((row[i] & 0x7fff) >> coder->plan->kind);
    return 1;
}

/* Returns 0 if too many elements have no level. */
static int split(encoder *coder) {
    const kv_plan *plan = coder->plan;
    kv_state state;
    uint64_t done = 0;
    for (uint64_t segment = 0; segment < plan->segments; segment++) {
        for (uint64_t from = 0; from < plan->channels; from += TILE) {
            uint32_t width = plan->channels - from < TILE ? (uint32_t)(plan->channels - from) : TILE;
            for (uint32_t i = 0; i < TILE; i++) {
                state.level[i] = (int16_t)(2 * coder->priors[segment]);
                state.sign[i] = 0;
            }
            for (uint64_t token = 0; token < plan->tokens; token++, done += width) {
                const uint16_t *row = coder->data + (segment * plan->tokens + token) * plan->channels + from;
                kv_shifts shifts = kv_shifts_at(token, segment >= plan->segments / 2);
                uint16_t *indices = coder->indices + done;
                uint32_t number =
                    coder->kernels->split_row(row, width, plan->kind, coder->low, &state, shifts, indices);
                if (number && !note_escapes(coder, row, indices, width, number)) return 0;
            }
        }
    }
    return 1;
}

static void count(encoder *coder) {
    uint32_t *even = coder->counts[0], *odd = coder->counts[CONTEXTS];
    uint64_t elements = coder->plan->elements, i = 0;
    memset(even, 0, sizeof(uint32_t) * 2 * CONTEXTS * SYMBOLS);
    /* Two sets: adding to the same place twice in a row would wait for the first sum. */
    for (; i + 4 <= elements; i += 4) {
        uint64_t four;
        memcpy(&four, coder->indices + i, 8);
        even[four & 0xffff]++;
        odd[four >> 16 & 0xffff]++;
        even[four >> 32 & 0xffff]++;
        odd[four >> 48]++;
    }
    for (; i < elements; i++) even[coder->indices[i]]++;
    for (int k = 0; k < CONTEXTS * SYMBOLS; k++) even[k] += odd[k];
}

/* Merges neighbouring contexts until each table has enough symbols to pay for itself. */
static void join_contexts(encoder *coder) {
    uint64_t gathered = 0;
    int table = 0;
    coder->starts = 1;
    for (int context = 0; context < CONTEXTS; context++) {
        uint64_t here = 0;
        for (int i = 0; i < SYMBOLS; i++) here += coder->counts[context][i];
        if (here && (gathered >= TABLE_COUNT || (context >= LEVELS && coder->starts >> LEVELS == 0 && gathered))) {
            table++;
            gathered = 0;
            coder->starts |= (uint64_t)1 << context;
        }
        gathered += here;
        if (table != context) {
            for (int i = 0; i < SYMBOLS; i++) {
                uint32_t moved = coder->counts[context][i];
                coder->counts[context][i] = 0;
                coder->counts[table][i] += moved;
            }
        }
    }
}

/* Writes one table and sets the codes of its symbols. */
static uint8_t *write_table(const uint32_t *counts, uint32_t *codes, uint8_t *at) {
    uint8_t weights[SYMBOLS];
    uint16_t frequencies[SYMBOLS] = {0};
    uint32_t highest = 0, start = 0;
    for (int i = 0; i < SYMBOLS; i++) highest = counts[i] > highest ? counts[i] : highest;
    for (int i = 0; i < SYMBOLS; i++) weights[i] = kv_weight_code(counts[i], highest);
    for (int half = 0; half < SYMBOLS; half += SYMBOLS / 2) {
        int first = 0, end = SYMBOLS / 2;
        while (end > 0 && !weights[half + end - 1]) end--;
        while (first < end && !weights[half + first]) first++;
        *at++ = (uint8_t)first;
        *at++ = (uint8_t)(end - first);
        for (int i = first; i < end; i += 2)
            *at++ = (uint8_t)(weights[half + i] | (i + 1 < end ? weights[half + i + 1] << 4 : 0));
    }
    kv_frequencies(weights, frequencies);
    for (int i = 0; i < SYMBOLS; i++) {
        uint32_t frequency = frequencies[i];
        codes[2 * i] = frequency > 1 ? (uint32_t)(((uint64_t)1 << 32) / frequency) : UINT32_MAX;
        codes[2 * i + 1] = frequency << 16 | start;
        start += frequency;
    }
    return at;
}

/* Codes the symbols from the last to the first, and the words downwards from `end`. */
static uint8_t *code_backwards(const encoder *coder, uint32_t *states, uint8_t *end) {
    const kv_plan *plan = coder->plan;
    uint64_t at = plan->elements, tiles = (plan->channels + TILE - 1) / TILE;
    for (uint64_t segment = plan->segments; segment-- > 0;) {
        for (uint64_t tile = tiles; tile-- > 0;) {
            uint64_t left = plan->channels - tile * TILE;
            uint32_t width = left < TILE ? (uint32_t)left : TILE, whole = width / LANES * LANES;
            for (uint64_t token = plan->tokens; token-- > 0;) {
                at -= width;
                end = kv_encode_tail(states, coder->indices + at + whole, width - whole, coder->codes, end);
                end = coder->kernels->encode_groups(states, coder->indices + at, width / LANES, coder->codes, end);
            }
        }
    }
    return end;
}

static uint8_t *write_low(const encoder *coder, uint8_t *at) {
    const kv_plan *plan = coder->plan;
    uint64_t chunks = plan->elements / CHUNK;
    coder->kernels->pack_low(coder->data, chunks, plan->kind, at);
    at += chunks * kv_chunk_bytes(plan->kind);
    for (uint64_t i = chunks * CHUNK; i < plan->elements; i++) {
        uint32_t bits = coder->data[i] & kv_low_mask(plan->kind);
        *at++ = (uint8_t)bits;
        if (kv_rest_bytes(plan->kind) == 2) *at++ = (uint8_t)(bits >> 8);
    }
    return at;
}

static int64_t write_body(encoder *coder, uint8_t *body, uint64_t space) {
    const kv_plan *plan = coder->plan;
    uint8_t *at = body + HEAD_BYTES + plan->segments;
    for (int context = 0, table = -1; context < CONTEXTS; context++) {
        uint32_t *codes = coder->codes + 2 * SYMBOLS * context;
        if (coder->starts >> context & 1)
            at = write_table(coder->counts[++table], codes, at);
        else
            memcpy(codes, codes - 2 * SYMBOLS, 2 * SYMBOLS * sizeof *codes);
    }
    memmove(at, coder->escaped, coder->escapes);
    at = write_low(coder, at + coder->escapes);

    uint32_t states[LANES];
    for (int lane = 0; lane < LANES; lane++) states[lane] = STATE_LOW;
    uint8_t *end = body + space, *words = code_backwards(coder, states, end);
    for (int lane = 0; lane < LANES; lane++, at += 4) kv_put32(at, states[lane]);
    uint64_t word_bytes = (uint64_t)(end - words);
    memmove(at, words, word_bytes);
    at += word_bytes;

    memset(body, 0, HEAD_BYTES);
    body[0] = (uint8_t)coder->low;
    kv_put32(body + 4, (uint32_t)coder->escapes);
    kv_put32(body + 8, (uint32_t)(word_bytes / 2));
    kv_put64(body + 12, coder->starts);
    return at - body;
}

int64_t kite_kv_encode(const kite_kv_shape *shape, const uint16_t *data, uint8_t *body, uint64_t body_space,
                       uint8_t *scratch, uint64_t scratch_bytes) {
    kv_plan plan;
    const kv_kernels *kernels = kv_choose(shape->kernel);
    if (!kernels || !kv_make_plan(shape, &plan) || body_space < kite_kv_encode_bound(shape) ||
        scratch_bytes < kite_kv_encode_scratch(shape))
        return KITE_BAD_ARGUMENT;
    encoder coder = {.plan = &plan, .kernels = kernels, .data = data};
    coder.priors = body + HEAD_BYTES;
    coder.counts = (uint32_t(*)[SYMBOLS])(void *)scratch;
    coder.codes = (uint32_t *)(void *)(scratch + CONTEXTS * SYMBOLS * 8);
    coder.indices = (uint16_t *)(void *)(scratch + CONTEXTS * SYMBOLS * 16);
    coder.most_escapes = most_escapes(&plan);
    /* The escaped exponents wait where the end of the words will be, and move before those are written. */
    coder.escaped = coder.escaped_end = body + HEAD_BYTES + plan.segments + CONTEXTS * MAX_TABLE_BYTES;
    choose_levels(&coder);
    if (!split(&coder)) return 0;
    count(&coder);
    join_contexts(&coder);
    int64_t written = write_body(&coder, body, body_space);
    return (uint64_t)written < 2 * plan.elements ? written : 0;
}
