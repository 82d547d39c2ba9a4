/* Packed KV blocks: `int8c`, `int4c` and `int8t`, byte for byte as kernels/reference_kv.py says.
 *
 * A block is [layer][K, V][kv_head][16 * D] in bf16 or fp32, in slots ([slot][channel]) or in the
 * panels of cpu_attention.c. A unit is K or V of one head of one layer: it becomes a tile of fp32
 * rows, each with a scale of its own: K a row of 16 slots for each channel, V a row of channels for
 * each slot. Sums are never fused with products, so that other compilers and devices agree.
 */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define SLOTS 16
#define DIM_MAX 512
#define INLINE static inline __attribute__((always_inline))

enum { INT8C = 0, INT4C = 1, INT8T = 2 };
enum { KEY_UNITS = 5, VALUE_UNITS = 4 }; /* bits of a span in units: see the reference */
enum { PACKED = 0, NOT_FINITE = 1, TOO_LARGE = 2 };

typedef struct {
    int32_t layers, kv_heads, head_dim, format;
    int32_t is_bf16, is_panels;
    const float *signs; /* [head_dim]: of the rotation of int4c's values */
    float norm;         /* 1 / sqrt(head_dim) */
} KvShape;

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int8_t vb __attribute__((vector_size(16)));
typedef int16_t vs __attribute__((vector_size(32)));
typedef uint16_t vh __attribute__((vector_size(32)));
#define LANES 16

INLINE vf load(const void *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(void *p, vf v) { memcpy(p, &v, sizeof v); }

#if defined(__AVX512F__)
INLINE vi larger_of(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }

INLINE vi smaller_of(vi a, vi b) { return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b); }
#else
INLINE vi larger_of(vi a, vi b) {
    vi more = a > b;
    return (a & more) | (b & ~more);
}

INLINE vi smaller_of(vi a, vi b) {
    vi less = a < b;
    return (a & less) | (b & ~less);
}
#endif

/* Lanes of `a` (0 to 15) and `b` (16 to 31), by constant numbers. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* Lane l of the result: of `a` where bit `half` of l is clear, else of `b`; from lane l ^ `across`. */
#define PICK1(l, half, across) (((l) & (half) ? 16 : 0) + ((l) ^ (across)))
#define PICK(a, b, half, across)                                                               \
    SHUFFLE(                                                                   \
        a, b, PICK1(0, half, across), PICK1(1, half, across), PICK1(2, half, across),          \
        PICK1(3, half, across), PICK1(4, half, across), PICK1(5, half, across),                \
        PICK1(6, half, across), PICK1(7, half, across), PICK1(8, half, across),                \
        PICK1(9, half, across), PICK1(10, half, across), PICK1(11, half, across),              \
        PICK1(12, half, across), PICK1(13, half, across), PICK1(14, half, across),             \
        PICK1(15, half, across))
#define SWAP(v, half) PICK(v, v, 0, half)

#define FOLD(half)                                                                             \
    for (int i = 0; i < (half); i++)                                                           \
        v[i] = larger_of(PICK(v[i], v[i + (half)], half, 0), PICK(v[i], v[i + (half)], half, half));

/* Return the largest lane of each of 16 vectors, in the lane of its number. */
INLINE vi largest_lanes(vi *v) {
    FOLD(8) FOLD(4) FOLD(2) FOLD(1)
    return v[0];
}

/* Return integers whose order is that of the floats, and back. */
INLINE vi ordered(vi bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

/* Round to the nearest integer, halves to even; |x| < 2^22. */
INLINE vi rounded(vf x) { return (vi)(x + 12582912.0f) - 0x4b400000; }

/* Load 16 bytes. By way of 16 bits: gcc 12 would convert byte by byte. */
INLINE vi wide_bytes(const int8_t *from) {
    vb bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, vs), vi);
}

INLINE vu to_bf16(vf x) {
    vu bits = (vu)x;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

/* -- blocks and tiles ----------------------------------------------------------------------- */

/* Write to `low` and `high` the fp32 values of 16 words of two bf16. */
INLINE void split(const uint32_t *words, float *low, float *high) {
    vu w = (vu)load(words);
    store(low, (vf)(w << 16));
    store(high, (vf)(w & 0xffff0000u));
}

INLINE void widen(const uint16_t *from, float *to, int count) {
    for (int i = 0; i < count; i += LANES) {
        vh halves;
        memcpy(&halves, from + i, sizeof halves);
        store(to + i, (vf)(__builtin_convertvector(halves, vu) << 16));
    }
}

#define EXCHANGE(half)                                                                         \
    for (int i = 0; i < LANES; i++)                                                            \
        if (!(i & (half))) {                                                                   \
            vi x = v[i], y = v[i + (half)];                                                    \
            vi swapped_x = SWAP(x, half), swapped_y = SWAP(y, half);                           \
            v[i] = PICK(x, swapped_y, half, 0);                                                \
            v[i + (half)] = PICK(swapped_x, y, half, 0);                                       \
        }

/* Write the transpose of from [rows][columns] to `to`; both are multiples of 16. */
static void transpose(const float *from, float *to, int rows, int columns) {
    for (int row = 0; row < rows; row += LANES)
        for (int column = 0; column < columns; column += LANES) {
            vi v[LANES];
            for (int i = 0; i < LANES; i++) v[i] = (vi)load(from + (row + i) * columns + column);
            EXCHANGE(8) EXCHANGE(4) EXCHANGE(2) EXCHANGE(1)
            for (int i = 0; i < LANES; i++) store(to + (column + i) * rows + row, (vf)v[i]);
        }
}

/* Read a unit into rows of fp32: [slot][channel], or [channel][slot] for keys by channel. */
static void read_unit(int is_bf16, int is_panels, int is_key, int by_channel,
                      const void *unit, float *tile, int dim) {
    float scratch[DIM_MAX * SLOTS] __attribute__((aligned(64)));
    const int is_transposed = is_panels && is_key ? !by_channel : by_channel;
    float *to = is_transposed ? scratch : tile;
    if (!is_bf16) {
        memcpy(to, unit, (size_t)dim * SLOTS * 4);
    } else if (!is_panels) {
        widen(unit, to, dim * SLOTS);
    } else if (is_key) { /* words of two channels, [dim / 2][slot] */
        for (int d = 0; d < dim; d += 2)
            split((const uint32_t *)unit + d / 2 * SLOTS, to + d * SLOTS, to + (d + 1) * SLOTS);
    } else { /* words of two slots, [slot / 2][dim] */
        for (int slot = 0; slot < SLOTS; slot += 2)
            for (int d = 0; d < dim; d += LANES)
                split((const uint32_t *)unit + slot / 2 * dim + d, to + slot * dim + d,
                      to + (slot + 1) * dim + d);
    }
    if (is_transposed) transpose(scratch, tile, by_channel ? SLOTS : dim, by_channel ? dim : SLOTS);
}

/* Write a unit from rows of fp32; undoes `read_unit`. */
static void write_unit(int is_bf16, int is_panels, int is_key, int by_channel,
                       const float *tile, void *unit, int dim) {
    float scratch[DIM_MAX * SLOTS] __attribute__((aligned(64)));
    const int is_transposed = is_panels && is_key ? !by_channel : by_channel;
    const float *from = is_transposed ? scratch : tile;
    if (is_transposed) transpose(tile, scratch, by_channel ? dim : SLOTS, by_channel ? SLOTS : dim);
    if (!is_bf16) {
        memcpy(unit, from, (size_t)dim * SLOTS * 4);
    } else if (!is_panels) {
        for (int i = 0; i < dim * SLOTS; i += LANES) {
            vh halves = __builtin_convertvector(to_bf16(load(from + i)), vh);
            memcpy((uint16_t *)unit + i, &halves, sizeof halves);
        }
    } else {
        const int rows = is_key ? dim : SLOTS, width = is_key ? SLOTS : dim;
        for (int row = 0; row < rows; row += 2)
            for (int i = 0; i < width; i += LANES) {
                vu low = to_bf16(load(from + row * width + i));
                vu high = to_bf16(load(from + (row + 1) * width + i));
                store((uint32_t *)unit + row / 2 * width + i, (vf)(low | high << 16));
            }
    }
}

/* -- 8 bits --------------------------------------------------------------------------------- */

/* Return the wide value of 16 halves that are normal, positive or zero bits. */
INLINE vi wide_halves(const uint8_t *from) {
    vh halves;
    memcpy(&halves, from, sizeof halves);
    return __builtin_convertvector(halves, vi);
}

INLINE void store_halves(uint8_t *to, vi bits) {
    vh halves = __builtin_convertvector((vu)bits, vh);
    memcpy(to, &halves, sizeof halves);
}

INLINE int any_above(vi v, int32_t limit) {
    vi more = v > limit;
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= more[i];
    return found;
}

/* Pack rows [rows][width] of a tile into scales and values. */
static int pack_8(const float *tile, uint8_t *scales, int8_t *values, const int rows,
                  const int width) {
    vi worst = {0}, widest = {0};
    for (int group = 0; group < rows; group += LANES) {
        const float *x = tile + group * width;
        vi most[LANES];
        for (int row = 0; row < LANES; row++) {
            most[row] = (vi)load(x + row * width) & 0x7fffffff;
            for (int i = LANES; i < width; i += LANES)
                most[row] = larger_of(most[row], (vi)load(x + row * width + i) & 0x7fffffff);
        }
        const vi largest = largest_lanes(most);
        vi bits = larger_of((vi)((vf)largest / 127.0f), (vi){0} + (113 << 23));
        bits = (bits + 0x1fff) >> 13; /* rounded up to 10 bits */
        float inverse[LANES];
        store(inverse, 1.0f / (vf)(bits << 13));
        store_halves(scales + 2 * group, bits - (112 << 10));
        worst = larger_of(worst, largest);
        widest = larger_of(widest, bits - (112 << 10));
        for (int row = 0; row < LANES; row++)
            for (int i = 0; i < width; i += LANES) {
                vi whole = rounded(load(x + row * width + i) * inverse[row]);
                vb bytes = __builtin_convertvector(whole, vb);
                memcpy(values + (group + row) * width + i, &bytes, sizeof bytes);
            }
    }
    if (any_above(worst, 0x7f7fffff)) return NOT_FINITE;
    return any_above(widest, 0x7bff) ? TOO_LARGE : PACKED;
}

static void unpack_8(float *tile, const uint8_t *scales, const int8_t *values, const int rows,
                     const int width) {
    for (int group = 0; group < rows; group += LANES) {
        float scale[LANES];
        store(scale, (vf)((wide_halves(scales + 2 * group) << 13) + (112 << 23)));
        for (int row = 0; row < LANES; row++)
            for (int i = 0; i < width; i += LANES) {
                const vi whole = wide_bytes(values + (group + row) * width + i);
                store(tile + (group + row) * width + i,
                      __builtin_convertvector(whole, vf) * scale[row]);
            }
    }
}

/* -- 4 bits --------------------------------------------------------------------------------- */

/* Convert multiples of 2^-14 of at most 11 bits to fp16's bits. */
INLINE vi exact_halves(vf x) {
    const vi bits = (vi)x & 0x7fffffff;
    return (((bits >> 13) - (112 << 10)) & (bits != 0)) | ((vi)x >> 16 & 0x8000);
}

/* Convert such bits back. */
INLINE vf exact_floats(vi halves) {
    const vi bits = halves & 0x7fff;
    return (vf)((((bits << 13) + (112 << 23)) & (bits != 0)) | (halves & 0x8000) << 16);
}

/* Turn the ends of 16 ranges, as ordered integers, into multiples of a power of two: see `_snapped`
 * of the reference. Adds to `worst` the largest absolute value, to `widest` the largest end. */
INLINE void snap(vi bottom, vi top, int bits, vf *minimum, vf *span, vi *worst, vi *widest) {
    const vi low_bits = ordered(bottom), high_bits = ordered(top);
    const vf low = (vf)low_bits, high = (vf)high_bits;
    const vi largest = larger_of(low_bits & 0x7fffffff, high_bits & 0x7fffffff);
    *worst = larger_of(*worst, largest);
    vi exponent = larger_of((((vi)(high - low) >> 23) - bits), (largest >> 23) - 10);
    exponent = larger_of(exponent, (vi){0} + 127 - 14); /* biased, as that of its inverse below */
    exponent = smaller_of(exponent, (vi){0} + 250);
    const vf fine = (vf)((254 - exponent) << 23);
    vi first = rounded(low * fine), last = rounded(high * fine);
    const vi far = larger_of(larger_of(first, -first), larger_of(last, -last));
    exponent -= (last - first >= 2 << bits) | (far > 2047); /* true is -1 */
    const vf coarse = (vf)((254 - exponent) << 23), unit = (vf)(exponent << 23);
    first = rounded(low * coarse), last = rounded(high * coarse);
    *minimum = __builtin_convertvector(first, vf) * unit;
    *span = __builtin_convertvector(larger_of(last - first, (vi){0} + 15), vf) * unit;
    *widest = larger_of(*widest, larger_of((vi)*minimum & 0x7fffffff, (vi)*span));
}

#define EVEN_ODD(a, b, odd)                                                                    \
    SHUFFLE(a, b, 0 + (odd), 2 + (odd), 4 + (odd), 6 + (odd), 8 + (odd),       \
                            10 + (odd), 12 + (odd), 14 + (odd), 16 + (odd), 18 + (odd),        \
                            20 + (odd), 22 + (odd), 24 + (odd), 26 + (odd), 28 + (odd),        \
                            30 + (odd))

/* Return one vector's values of 4 bits. */
INLINE vi nibbles_of(const float *x, float minimum, float inverse, vi counts) {
    const vi whole = rounded((load(x) - minimum) * inverse);
    return smaller_of(larger_of(whole, (vi){0}), (vi){0} + 15) & counts;
}

/* Pack rows [rows][width] of a tile; of a row, the first `counted` values count. `bits` of a span. */
static int pack_4(const float *tile, uint8_t *spans, uint8_t *minima, uint8_t *values,
                  const int rows, const int width, const int counted, const int bits) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vi counts = width > LANES ? (vi){0} - 1 : lane < counted;
    vi worst = {0}, widest = {0};
    for (int group = 0; group < rows; group += LANES) {
        const float *x = tile + group * width;
        vi least[LANES], most[LANES]; /* ~: the order turned round, so that the smallest is largest */
        for (int row = 0; row < LANES; row++) {
            const vi first = ordered((vi)load(x + row * width)), none = ~counts & INT32_MIN;
            least[row] = (~first & counts) | none;
            most[row] = (first & counts) | none;
            for (int i = LANES; i < width; i += LANES) {
                const vi next = ordered((vi)load(x + row * width + i));
                least[row] = larger_of(least[row], ~next);
                most[row] = larger_of(most[row], next);
            }
        }
        vf minimum, span;
        snap(~largest_lanes(least), largest_lanes(most), bits, &minimum, &span, &worst, &widest);
        const vf inverse = 15.0f / span;
        store_halves(spans + 2 * group, exact_halves(span));
        store_halves(minima + 2 * group, exact_halves(minimum));
        float least_of[LANES], inverse_of[LANES];
        store(least_of, minimum), store(inverse_of, inverse);
        const int together = width > LANES ? 1 : 2; /* rows of one pair of vectors */
        for (int row = 0, last = together - 1; row < LANES; row += together)
            for (int i = row * width; i < (row + together) * width; i += 2 * LANES) {
                const vi a = nibbles_of(x + i, least_of[row], inverse_of[row], counts);
                const vi b = nibbles_of(x + i + LANES, least_of[row + last],
                                        inverse_of[row + last], counts);
                const vi both = EVEN_ODD(a, b, 0) | EVEN_ODD(a, b, 1) << 4;
                const vb bytes = __builtin_convertvector(both, vb);
                memcpy(values + (group * width + i) / 2, &bytes, sizeof bytes);
            }
    }
    if (any_above(worst, 0x7f7fffff)) return NOT_FINITE;
    return any_above(widest, 0x477fe000) ? TOO_LARGE : PACKED; /* 65504 */
}

static void unpack_4(float *tile, const uint8_t *spans, const uint8_t *minima,
                     const uint8_t *values, const int rows, const int width) {
    for (int group = 0; group < rows; group += LANES) {
        float *x = tile + group * width;
        const vf minimum = exact_floats(wide_halves(minima + 2 * group));
        const vf span = exact_floats(wide_halves(spans + 2 * group));
        const vf step = (vf)((vi)(span / 15.0f) & -16);
        float least_of[LANES], step_of[LANES];
        store(least_of, minimum), store(step_of, step);
        const int together = width > LANES ? 1 : 2; /* rows of one pair of vectors */
        for (int row = 0, last = together - 1; row < LANES; row += together)
            for (int i = row * width; i < (row + together) * width; i += 2 * LANES) {
                const vi both = wide_bytes((const int8_t *)values + (group * width + i) / 2) & 0xff;
                const vi low = both & 15, high = both >> 4;
                const vi a = SHUFFLE(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20,
                                                     5, 21, 6, 22, 7, 23);
                const vi b = SHUFFLE(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12,
                                                     28, 13, 29, 14, 30, 15, 31);
                store(x + i, __builtin_convertvector(a, vf) * step_of[row] + least_of[row]);
                store(x + i + LANES, __builtin_convertvector(b, vf) * step_of[row + last] +
                                         least_of[row + last]);
            }
    }
}

/* -- the rotation of values ------------------------------------------------------------------ */


INLINE vf small_butterflies(vf v) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int32_t flip = INT32_MIN;
    v = SWAP(v, 1) + (vf)((vi)v ^ ((lane & 1) * flip));
    v = SWAP(v, 2) + (vf)((vi)v ^ ((lane >> 1 & 1) * flip));
    v = SWAP(v, 4) + (vf)((vi)v ^ ((lane >> 2 & 1) * flip));
    return SWAP(v, 8) + (vf)((vi)v ^ ((lane >> 3 & 1) * flip));
}

/* Rotate each slot's row: signs first when packing, last when unpacking. */
static void rotate_values(float *tile, const float *signs, float norm, int is_back, const int dim) {
    for (int slot = 0; slot < SLOTS; slot++) {
        float *x = tile + slot * dim;
        for (int i = 0; i < dim; i += LANES) {
            vf v = load(x + i);
            store(x + i, small_butterflies(is_back ? v : v * load(signs + i)));
        }
        for (int half = LANES; half < dim; half *= 2)
            for (int first = 0; first < dim; first += 2 * half)
                for (int i = first; i < first + half; i += LANES) {
                    vf a = load(x + i), b = load(x + i + half);
                    store(x + i, a + b);
                    store(x + i + half, a - b);
                }
        for (int i = 0; i < dim; i += LANES) {
            vf v = load(x + i) * norm;
            store(x + i, is_back ? v * load(signs + i) : v);
        }
    }
}

/* -- whole blocks --------------------------------------------------------------------------- */

/* Where the parts of a packed unit begin, and where the unit ends. */
typedef struct {
    size_t scales, minima, values, end;
} Places;

static Places places_of(const KvShape *s, size_t start, int head, int is_value) {
    const size_t dim = s->head_dim, rows = is_value ? SLOTS : dim, heads = s->kv_heads;
    if (s->format == INT8T) {
        const size_t at = start + head * (dim + 2) * SLOTS;
        return (Places){at + dim * SLOTS, 0, at, start + heads * (dim + 2) * SLOTS};
    }
    const int has_minima = s->format == INT4C;
    const size_t ends = heads * rows * 2, bytes = dim * SLOTS / (has_minima ? 2 : 1);
    const size_t first = start + ends * (has_minima ? 2 : 1);
    return (Places){start + head * rows * 2, start + ends + head * rows * 2, first + head * bytes,
                    first + heads * bytes};
}

static int pack_unit(const KvShape *s, int is_value, const uint8_t *unit, uint8_t *out, Places at, int tokens, const int dim) {
    float tile[DIM_MAX * SLOTS] __attribute__((aligned(64)));
    const int by_channel = !is_value && s->format != INT8T;
    read_unit(s->is_bf16, s->is_panels, !is_value, by_channel, unit, tile, dim);
    if (tokens < SLOTS) {
        if (by_channel)
            for (int d = 0; d < dim; d++)
                memset(tile + d * SLOTS + tokens, 0, (size_t)(SLOTS - tokens) * 4);
        else
            memset(tile + tokens * dim, 0, (size_t)(SLOTS - tokens) * dim * 4);
    }
    uint8_t *scales = out + at.scales, *minima = out + at.minima, *values = out + at.values;
    if (s->format != INT4C)
        return by_channel ? pack_8(tile, scales, (int8_t *)values, dim, SLOTS)
                          : pack_8(tile, scales, (int8_t *)values, SLOTS, dim);
    if (!is_value) return pack_4(tile, scales, minima, values, dim, SLOTS, tokens, KEY_UNITS);
    rotate_values(tile, s->signs, s->norm, 0, dim);
    const int failed = pack_4(tile, scales, minima, values, SLOTS, dim, LANES, VALUE_UNITS);
    memset(scales + tokens * 2, 0, (size_t)(SLOTS - tokens) * 2);
    memset(minima + tokens * 2, 0, (size_t)(SLOTS - tokens) * 2);
    memset(values + tokens * dim / 2, 0, (size_t)(SLOTS - tokens) * dim / 2);
    return failed;
}

static void unpack_unit(const KvShape *s, int is_value, const uint8_t *packed, uint8_t *unit, Places at,
                        int tokens, const int dim) {
    float tile[DIM_MAX * SLOTS] __attribute__((aligned(64)));
    const int by_channel = !is_value && s->format != INT8T;
    const int rows = by_channel ? dim : SLOTS, width = by_channel ? SLOTS : dim;
    const uint8_t *scales = packed + at.scales, *values = packed + at.values;
    if (s->format == INT4C) {
        unpack_4(tile, scales, packed + at.minima, values, rows, width);
        if (is_value) rotate_values(tile, s->signs, s->norm, 1, dim);
    } else {
        unpack_8(tile, scales, (const int8_t *)values, rows, width);
    }
    if (tokens < SLOTS) {
        if (by_channel)
            for (int d = 0; d < dim; d++)
                memset(tile + d * SLOTS + tokens, 0, (size_t)(SLOTS - tokens) * 4);
        else
            memset(tile + tokens * dim, 0, (size_t)(SLOTS - tokens) * dim * 4);
    }
    write_unit(s->is_bf16, s->is_panels, !is_value, by_channel, tile, unit, dim);
}

/* Pack or unpack every unit of a block. */
static int convert(const KvShape *s, int is_pack, uint8_t *block, uint8_t *packed, int tokens) {
    const size_t unit_bytes = (size_t)s->head_dim * SLOTS * (s->is_bf16 ? 2 : 4);
    size_t start = 0;
    uint8_t *unit = block;
    for (int layer = 0; layer < s->layers; layer++)
        for (int is_value = 0; is_value < 2; is_value++) {
            for (int head = 0; head < s->kv_heads; head++, unit += unit_bytes) {
                const Places at = places_of(s, start, head, is_value);
                int failed = PACKED;
                if (is_pack)
                    failed = pack_unit(s, is_value, unit, packed, at, tokens, s->head_dim);
                else
                    unpack_unit(s, is_value, packed, unit, at, tokens, s->head_dim);
                if (failed) return failed;
            }
            start = places_of(s, start, 0, is_value).end;
        }
    return PACKED;
}

/* Pack the first `tokens` slots of a block. Returns 0, or why it cannot be packed. */
int kv_pack(const KvShape *s, const uint8_t *block, uint8_t *packed, int tokens) {
    return convert(s, 1, (uint8_t *)block, packed, tokens);
}

/* Fill a block from its packed bytes; slots from `tokens` on become zero. */
void kv_unpack(const KvShape *s, const uint8_t *packed, uint8_t *block, int tokens) {
    convert(s, 0, block, (uint8_t *)packed, tokens);
}
