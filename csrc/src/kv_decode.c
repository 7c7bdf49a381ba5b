/* Decoding a body that nobody vouches for: all sizes first, then the tables, then rows with checked reads. */
#include "kv.h"

typedef struct {
    const kv_plan *plan;
    const kv_kernels *kernels;
    int low;
    const uint8_t *priors, *escaped, *escaped_end, *low_bits;
    kv_reader words;
    uint32_t states[LANES];
    uint32_t *slots; /* per table and slot: symbol, offset in its range, frequency */
    uint8_t table_of[CONTEXTS];
} decoder;

uint64_t kite_kv_decode_scratch(const kite_kv_shape *shape) {
    kv_plan plan;
    return kv_make_plan(shape, &plan) ? (uint64_t)CONTEXTS * PROB_SUM * 4 : 0;
}

/* Reads a table's weight codes; NULL if it is damaged. */
static const uint8_t *read_weights(const uint8_t *at, const uint8_t *end, uint8_t *weights) {
    memset(weights, 0, SYMBOLS);
    for (int half = 0; half < SYMBOLS; half += SYMBOLS / 2) {
        if (end - at < 2) return NULL;
        int first = at[0], number = at[1];
        at += 2;
        if (first + number > SYMBOLS / 2 || end - at < (number + 1) / 2) return NULL;
        for (int i = 0; i < number; i++) weights[half + first + i] = at[i / 2] >> (i % 2 * 4) & 15;
        at += (number + 1) / 2;
    }
    return at;
}

static void fill_slots(const uint16_t *frequencies, uint32_t *slots) {
    for (uint32_t symbol = 0; symbol < SYMBOLS; symbol++) {
        uint32_t frequency = frequencies[symbol], slot = frequency << 20 | symbol;
        for (uint32_t i = 0; i < frequency; i++) *slots++ = slot + (i << 8);
    }
}

/* Reads everything before the words; 0 if the body is damaged. */
static int open_body(decoder *coder, const uint8_t *body, uint64_t body_bytes) {
    const kv_plan *plan = coder->plan;
    if (body_bytes < HEAD_BYTES + plan->segments) return 0;
    const uint8_t *at = body + HEAD_BYTES + plan->segments, *end = body + body_bytes;
    uint64_t escapes = kv_get32(body + 4), words = kv_get32(body + 8), starts = kv_get64(body + 12);
    coder->low = body[0];
    if (coder->low > kv_max_low(plan->kind) || body[1] | body[2] | body[3] || !(starts & 1)) return 0;
    coder->priors = body + HEAD_BYTES;
    for (uint64_t i = 0; i < plan->segments; i++)
        if (coder->priors[i] > MAX_PRIOR) return 0;
    uint8_t table = 0, weights[SYMBOLS];
    uint16_t frequencies[SYMBOLS];
    for (int context = 0; context < CONTEXTS; context++) {
        if (starts >> context & 1) {
            at = read_weights(at, end, weights);
            if (!at || !kv_frequencies(weights, frequencies)) return 0;
            fill_slots(frequencies, coder->slots + ((size_t)table++ << PROB_BITS));
        }
        coder->table_of[context] = (uint8_t)(table - 1);
    }
    /* None of these can overflow: 32 bits each, and less than 2^31. */
    if ((uint64_t)(end - at) != escapes + plan->low_bytes + STATE_BYTES + 2 * words) return 0;
    coder->escaped = at;
    coder->escaped_end = at + escapes;
    coder->low_bits = coder->escaped_end;
    at = coder->low_bits + plan->low_bytes;
    for (int lane = 0; lane < LANES; lane++, at += 4) coder->states[lane] = kv_get32(at);
    coder->words.at = at;
    coder->words.end = end;
    return 1;
}

/* Sets the exponents of the elements that have no level; 0 if they can't be right. */
static int put_escapes(decoder *coder, const uint8_t *symbols, uint32_t width, uint16_t *row) {
    int kind = coder->plan->kind;
    uint32_t mask = kv_exponent_mask(kind);
    for (uint32_t i = 0; i < width; i++) {
        if (symbols[i] >> 1 & (LEVELS - 1)) continue;
        if (coder->escaped == coder->escaped_end || *coder->escaped > mask) return 0;
        row[i] = (uint16_t)((row[i] & ~(mask << kind)) | (uint32_t)*coder->escaped++ << kind);
    }
    return 1;
}

static int decode_row(decoder *coder, kv_state *state, kv_shifts shifts, uint32_t width, uint16_t *row) {
    uint8_t tables[TILE], symbols[TILE];
    coder->kernels->row_tables(state, width, coder->table_of, tables);
    uint32_t done =
        coder->kernels->decode_groups(coder->states, tables, width / LANES, coder->slots, &coder->words, symbols);
    if (done < width && !kv_decode_checked(coder->states, tables + done, width - done, coder->slots, &coder->words,
                                           symbols + done))
        return 0;
    uint32_t escapes =
        coder->kernels->join_row(symbols, width, coder->plan->kind, coder->low, state, shifts, row);
    return !escapes || put_escapes(coder, symbols, width, row);
}

static int decode_rows(decoder *coder, uint16_t *data) {
    const kv_plan *plan = coder->plan;
    kv_state state;
    for (uint64_t segment = 0; segment < plan->segments; segment++) {
        for (uint64_t from = 0; from < plan->channels; from += TILE) {
            uint32_t width = plan->channels - from < TILE ? (uint32_t)(plan->channels - from) : TILE;
            for (uint32_t i = 0; i < TILE; i++) {
                state.level[i] = (int16_t)(2 * coder->priors[segment]);
                state.sign[i] = 0;
            }
            for (uint64_t token = 0; token < plan->tokens; token++) {
                uint16_t *row = data + (segment * plan->tokens + token) * plan->channels + from;
                if (!decode_row(coder, &state, kv_shifts_at(token, segment >= plan->segments / 2), width, row))
                    return 0;
            }
        }
    }
    return 1;
}

/* Whether the stream ended where an encoder began it. */
static int at_end(const decoder *coder) {
    uint32_t different = 0;
    for (int lane = 0; lane < LANES; lane++) different |= coder->states[lane] ^ STATE_LOW;
    return !different && coder->words.at == coder->words.end && coder->escaped == coder->escaped_end;
}

static int merge_low(const decoder *coder, uint16_t *data) {
    const kv_plan *plan = coder->plan;
    uint64_t chunks = plan->elements / CHUNK;
    const uint8_t *at = coder->low_bits + chunks * kv_chunk_bytes(plan->kind);
    uint32_t wrong = 0;
    coder->kernels->merge_low(coder->low_bits, chunks, plan->kind, data);
    for (uint64_t i = chunks * CHUNK; i < plan->elements; i++) {
        uint32_t bits = *at++;
        if (kv_rest_bytes(plan->kind) == 2) bits |= (uint32_t)*at++ << 8;
        wrong |= bits & ~kv_low_mask(plan->kind);
        data[i] = (uint16_t)(data[i] | bits);
    }
    return !wrong;
}

int64_t kite_kv_decode(const kite_kv_shape *shape, const uint8_t *body, uint64_t body_bytes, uint16_t *data,
                       uint8_t *scratch, uint64_t scratch_bytes) {
    kv_plan plan;
    const kv_kernels *kernels = kv_choose(shape->kernel);
    if (!kernels || !kv_make_plan(shape, &plan) || scratch_bytes < kite_kv_decode_scratch(shape))
        return KITE_BAD_ARGUMENT;
    decoder coder = {.plan = &plan, .kernels = kernels, .slots = (uint32_t *)(void *)scratch};
    if (!open_body(&coder, body, body_bytes)) return KITE_DAMAGED;
    if (!decode_rows(&coder, data) || !at_end(&coder) || !merge_low(&coder, data)) return KITE_DAMAGED;
    return 0;
}
