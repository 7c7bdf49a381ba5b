/* Decodes damaged bodies under the sanitizers:
 *
 *   cc -std=c11 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all csrc/src/kv_*.c csrc/tests/fuzz_kv.c -o fuzz
 *   ./fuzz 300000 1
 *
 * Arguments: number of inputs, seed. Every input is a body that an encoder wrote, changed at random or cut, or noise. All
 * buffers have exactly the size that the interface asks for, so that any access outside of them ends the program. It
 * also checks that every kernel gives the same bytes, and that what was encoded comes back.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../include/kite.h"

static uint64_t seed;

static uint32_t random_below(uint32_t limit) { /* splitmix64 */
    uint64_t z = seed += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) >> 32) % limit;
}

static void *buffer(uint64_t size) {
    void *made = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!made) exit(3);
    return made;
}

static void fail(const char *what) {
    fprintf(stderr, "failed: %s\n", what);
    abort();
}

/* Exactly `size` bytes, so that reading one more is caught. */
static uint8_t *exact(const uint8_t *from, uint64_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy) exit(3);
    if (size) memcpy(copy, from, size);
    return copy;
}

static void fill(uint16_t *data, const kite_kv_shape *shape, uint64_t count) {
    uint32_t style = random_below(4), top = shape->kind == KITE_FLOAT16 ? 32 : 256, middle = random_below(top);
    for (uint64_t i = 0; i < count; i++) {
        uint32_t noise = random_below(65536), spread = style == 0 ? 1 : style == 1 ? 4 : 12;
        uint32_t exponent = (middle + random_below(spread) + (uint32_t)(i % shape->channels) % 3) % top;
        data[i] = (uint16_t)((noise & 0x8000) | exponent << shape->kind | (noise & ((1u << shape->kind) - 1)));
        if (style == 3 && random_below(8) == 0) data[i] = (uint16_t)noise;
    }
}

static uint64_t damage(uint8_t *body, uint64_t size) {
    uint32_t kind = random_below(8);
    uint32_t changes = kind == 0 ? 0 : 1 + random_below(kind < 5 ? 3 : 40);
    uint32_t reach = kind & 1 ? 200 : (uint32_t)size; /* the tables are where sizes are */
    if (reach > size) reach = (uint32_t)size;
    for (uint32_t i = 0; i < changes && reach; i++) body[random_below(reach)] ^= (uint8_t)(1 + random_below(255));
    if (kind == 7) return random_below((uint32_t)size + 1);
    return size;
}

static void one_input(void) {
    kite_kv_shape shape = {1 + random_below(4), 1 + random_below(9), 1 + random_below(random_below(9) ? 80 : 700),
                           random_below(2) ? KITE_FLOAT16 : KITE_BFLOAT16, KITE_BEST};
    uint64_t count = shape.segments * shape.tokens * shape.channels;
    uint64_t space = kite_kv_encode_bound(&shape), encode_scratch = kite_kv_encode_scratch(&shape);
    uint64_t decode_scratch = kite_kv_decode_scratch(&shape);
    uint16_t *data = buffer(2 * count), *back = malloc(2 * count);
    uint8_t *body = malloc(space), *other = malloc(space);
    uint8_t *scratch = buffer(encode_scratch > decode_scratch ? encode_scratch : decode_scratch);
    if (!back || !body || !other) exit(3);
    fill(data, &shape, count);
    int64_t size = kite_kv_encode(&shape, data, body, space, scratch, encode_scratch);
    if (size < 0) fail("encoding");
    for (int kernel = KITE_PLAIN; kernel <= kite_best_kernel(); kernel++) {
        shape.kernel = kernel;
        if (kite_kv_encode(&shape, data, other, space, scratch, encode_scratch) != size ||
            memcmp(body, other, (size_t)size))
            fail("kernels write different bytes");
        if (!size) continue;
        uint8_t *given = exact(body, (uint64_t)size);
        if (kite_kv_decode(&shape, given, (uint64_t)size, back, scratch, decode_scratch) ||
            memcmp(data, back, 2 * count))
            fail("round trip");
        free(given);
    }
    if (!size) { /* noise in place of a body */
        size = (int64_t)random_below(400);
        for (int64_t i = 0; i < size; i++) body[i] = (uint8_t)random_below(256);
    }
    for (int round = 0; round < 4; round++) {
        memcpy(other, body, (size_t)size);
        uint64_t cut = damage(other, (uint64_t)size);
        int64_t result[KITE_AVX512 + 1] = {0};
        for (int kernel = KITE_PLAIN; kernel <= kite_best_kernel(); kernel++) {
            uint8_t *given = exact(other, cut);
            shape.kernel = kernel;
            result[kernel] = kite_kv_decode(&shape, given, cut, back, scratch, decode_scratch);
            if (result[kernel] != 0 && result[kernel] != KITE_DAMAGED) fail("result");
            if (result[kernel] != result[KITE_PLAIN]) fail("kernels disagree about damage");
            free(given);
        }
    }
    free(data);
    free(back);
    free(body);
    free(other);
    free(scratch);
}

int main(int argc, char **argv) {
    long inputs = argc > 1 ? atol(argv[1]) : 1000;
    seed = argc > 2 ? (uint64_t)atol(argv[2]) : 1;
    for (long i = 0; i < inputs; i += 4) one_input();
    printf("%ld inputs: nothing was read or written outside\n", inputs);
    return 0;
}
