/* Random shapes and passes through every attention kernel, in buffers without a byte to spare: compile with the
 * address and undefined behaviour sanitizers, together with src/attend*.c and src/kv_*.c.
 *
 *     fuzz_attend ROUNDS SEED
 *
 * Also checks that the kernels agree, and that a row alone has the bits it has among others. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../include/kite.h"

static uint64_t state;

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % below);
}

static void *room(uint64_t bytes) {
    void *place = calloc(bytes ? bytes : 1, 1);
    if (!place) exit(3);
    return place;
}

static void fill(void *place, uint64_t count, int32_t kind) {
    for (uint64_t i = 0; i < count; i++) {
        const float value = ((float)draw(4001) - 2000.0f) / 1000.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (kind == KITE_FLOAT32)
            memcpy((uint8_t *)place + 4 * i, &value, sizeof value);
        else
            ((uint16_t *)place)[i] = (uint16_t)(kind == KITE_BFLOAT16 ? bits >> 16 : 0x3000 + draw(0xc00));
    }
}

static float number(const void *place, uint64_t i, int32_t kind) {
    float value;
    if (kind == KITE_FLOAT32) return ((const float *)place)[i];
    const uint16_t half = ((const uint16_t *)place)[i];
    uint32_t bits = (uint32_t)half << 16;
    if (kind == KITE_BFLOAT16) {
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    return ldexpf((float)((half & 1023) | 1024), (half >> 10 & 31) - 25) * (half & 0x8000 ? -1.0f : 1.0f);
}

static void check(int fine, const char *what) {
    if (fine) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static void attend(kite_attention *call) {
    const uint64_t bytes = kite_attend_scratch(call);
    check(bytes > 0 && bytes % 64 == 0, "no scratch size");
    uint8_t *scratch = room(bytes + 64); /* malloc aligns to 16 only */
    call->scratch = scratch + (64 - (uintptr_t)scratch % 64) % 64;
    call->scratch_bytes = bytes;
    check(kite_attend(call) == 0, "refused");
    free(scratch);
}

static void one_round(void) {
    static const int32_t kinds[] = {KITE_BFLOAT16, KITE_FLOAT16, KITE_FLOAT32};
    kite_attention call = {.kind = kinds[draw(3)], .threads = 1, .scale = 0.2f};
    const int32_t group = 1 + (int32_t)draw(9), context = 1 + (int32_t)draw(200);
    const int32_t rows = 1 + (int32_t)draw((uint32_t)context), padding = (int32_t)draw(3);
    call.kv_heads = 1 + (int32_t)draw(3);
    call.query_heads = group * call.kv_heads;
    call.key_dim = 1 + (int32_t)draw(draw(2) ? 40 : 140);
    call.value_dim = draw(2) ? call.key_dim : 1 + (int32_t)draw(140);
    call.block_tokens = 1 + (int32_t)draw(70);
    call.window = draw(2) ? 0 : 1 + (int32_t)draw(150);
    call.softcap = draw(2) ? 0.0f : 3.0f;
    call.item_heads = draw(2) ? 1 : call.kv_heads;
    call.rows = rows + padding;
    call.num_sequences = 1;
    const uint64_t bytes = call.kind == KITE_FLOAT32 ? 4 : 2, total = (uint64_t)call.rows;
    const uint64_t heads = (uint64_t)call.kv_heads, dims = (uint64_t)(call.key_dim + call.value_dim);
    const uint64_t query = total * (uint64_t)(call.query_heads * call.key_dim);
    const uint64_t key = total * heads * (uint64_t)call.key_dim, value = total * heads * (uint64_t)call.value_dim;
    const uint64_t out = total * (uint64_t)(call.query_heads * call.value_dim);
    const int32_t blocks = (context + call.block_tokens - 1) / call.block_tokens;
    const uint64_t pages = (uint64_t)(blocks * call.block_tokens) * heads * dims;
    void *space[] = {room(query * bytes), room(key * bytes), room(value * bytes), room(pages * bytes)};
    void *outs[] = {room(out * bytes), room(out * bytes)};
    fill(space[0], query, call.kind);
    fill(space[1], key, call.kind);
    fill(space[2], value, call.kind);
    fill(space[3], pages, call.kind);
    call.query = space[0];
    call.key = space[1];
    call.value = space[2];
    call.key_pages = space[3];
    call.key_block = call.value_block = (int64_t)(pages / (uint64_t)blocks);
    call.value_pages = (uint8_t *)space[3] + bytes * heads * (uint64_t)(call.block_tokens * call.key_dim);
    call.query_head = call.key_head = call.key_dim;
    call.value_head = call.value_dim;
    call.query_row = call.query_heads * call.key_dim;
    call.key_row = call.kv_heads * call.key_dim;
    call.value_row = call.kv_heads * call.value_dim;
    int32_t *tables = room(4 * (uint64_t)blocks), starts[2] = {0, rows}, contexts[1] = {context};
    int64_t *slots = room(8 * total);
    for (int32_t i = 0; i < blocks; i++) tables[i] = blocks - 1 - i;
    for (int32_t i = 0; i < call.rows; i++) {
        const int32_t position = context - rows + i;
        slots[i] = i < rows ? (int64_t)tables[position / call.block_tokens] * call.block_tokens +
                                  position % call.block_tokens
                            : -1;
    }
    const int32_t cut = (int32_t)draw((uint32_t)rows), split[6] = {0, 0, cut, 0, cut, rows - cut};
    call.tables = tables;
    call.table_width = blocks;
    call.row_starts = starts;
    call.contexts = contexts;
    call.slots = slots;
    call.items = cut ? split : split + 3;
    call.num_items = cut ? 2 : 1;
    call.item_rows = cut > rows - cut ? cut : rows - cut;
    for (int32_t kernel = KITE_PLAIN; kernel <= kite_best_kernel(); kernel++) {
        call.kernel = kernel;
        call.out = outs[kernel != KITE_PLAIN];
        attend(&call);
        for (uint64_t i = 0; i < out; i++)
            check(fabsf(number(outs[0], i, call.kind) - number(call.out, i, call.kind)) <= 0.03f, "kernels differ");
        /* The last row alone. */
        const uint64_t row = out / total * bytes;
        const int32_t last[3] = {0, rows - 1, 1};
        uint8_t *before = room(row);
        memcpy(before, (uint8_t *)call.out + row * (uint64_t)(rows - 1), row);
        kite_attention alone = call;
        alone.items = last;
        alone.num_items = alone.item_rows = 1;
        attend(&alone);
        check(!memcmp(before, (uint8_t *)call.out + row * (uint64_t)(rows - 1), row), "a row alone differs");
        free(before);
    }
    for (int i = 0; i < 4; i++) free(space[i]);
    free(outs[0]);
    free(outs[1]);
    free(tables);
    free(slots);
}

int main(int count, char **words) {
    const long rounds = count > 1 ? atol(words[1]) : 1000;
    state = count > 2 ? (uint64_t)atoll(words[2]) : 1;
    for (long i = 0; i < rounds; i++) one_round();
    return 0;
}
