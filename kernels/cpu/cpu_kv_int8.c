/* Blocks of the format `int8t`: values of 8 bits, a scale in fp16 for each token and head.
 *
 * K or V of one head of a block, D channels, S = 16 slots, is a unit of S * (D + 2) bytes:
 *     K  [D / 4][S] words of four channels      V  [S / 4][D] words of four slots
 *     then scales [S] fp16
 * kernels/reference_int8.py says which bytes; `int8_write` writes the same.
 *
 * With VNNI (four products of 8 bits an instruction) keys and values are multiplied as they lie. A
 * row of queries, or of probabilities times the values' scales, is rounded to 16 bits with a scale
 * of its own and cut into two limbs of 8; sums are integers, so that their order does not matter.
 * Elsewhere a tile is widened to fp32 and multiplied as WIDE panels.
 *
 * Sums are not fused with products: other compilers and the reference must round as this file does.
 */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif
#include "cpu.h"

#define FP16_MAX 65504.0f
#define ROUNDING 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, halves to even */

/* -- writing -------------------------------------------------------------------------------- */

/* Return x, 0 where it is no number or infinite, and what a scale of fp16 reaches where it is
 * beyond that. */
INLINE vf storable(vf x) {
    const vf most = (vf){0} + 127.0f * FP16_MAX;
    const vi size = (vi)x & 0x7fffffff;
    const vi sign = (vi)x & ~0x7fffffff;
    const vi is_beyond = size > (vi)most;
    const vi kept = (size & ~is_beyond) | ((vi)most & is_beyond);
    return (vf)((kept | sign) & (size < 0x7f800000));
}

/* Round x [dim] to out [dim]; return the bits of the scale. */
static uint16_t quantise(const float *x, int dim, int8_t *out) {
    vf largest = {0};
    for (int d = 0; d < dim; d += LANES)
        largest = larger_of((vf)((vi)storable(load(x + d)) & 0x7fffffff), largest);
    const float exact = max_of(largest) / 127.0f;
    uint32_t bits;
    memcpy(&bits, &exact, 4);
    if (bits < 113u << 23) bits = 113u << 23; /* 2^-14 */
    bits = (bits + 0x1fff) >> 13;             /* rounded up to 10 bits */
    const uint32_t wide = bits << 13;
    float scale;
    memcpy(&scale, &wide, 4);
    const float inverse = 1.0f / scale;
    for (int d = 0; d < dim; d += LANES) {
        const vi whole = (vi)(storable(load(x + d)) * inverse + ROUNDING) - 0x4b400000;
        int32_t lanes[LANES];
        memcpy(lanes, &whole, sizeof lanes);
        for (int i = 0; i < LANES; i++) out[d + i] = (int8_t)lanes[i];
    }
    return (uint16_t)(bits - (112 << 10));
}

void int8_write(const float *x, int dim, int is_value, int slot, uint8_t *unit) {
    int8_t values[dim] ALIGNED;
    const uint16_t scale = quantise(x, dim, values);
    if (is_value) {
        uint8_t *to = unit + slot / 4 * dim * 4 + slot % 4;
        for (int d = 0; d < dim; d++) to[4 * d] = (uint8_t)values[d];
    } else {
        for (int d = 0; d < dim; d += 4) memcpy(unit + (d * BLOCK + 4 * slot), values + d, 4);
    }
    memcpy(unit + BLOCK * dim + 2 * slot, &scale, 2);
}

/* Convert the 16 scales of a unit to fp32: normal numbers, or zero in a slot never written. */
void int8_scales(const uint8_t *unit, int dim, float *out) {
    const uint8_t *from = unit + BLOCK * dim;
#if defined(__AVX512F__)
    _mm512_storeu_ps(out, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)));
#else
    uint16_t halves[BLOCK];
    memcpy(halves, from, sizeof halves);
    for (int slot = 0; slot < BLOCK; slot++) {
        const uint32_t bits = halves[slot] ? ((uint32_t)halves[slot] << 13) + (112u << 23) : 0;
        memcpy(out + slot, &bits, 4);
    }
#endif
}

/* -- without VNNI --------------------------------------------------------------------------- */

/* Widen the words [rows / 4][columns] of a unit, without scales, to fp32 [rows][columns]. */
static void widen(const uint8_t *words, int rows, int columns, float *out) {
    for (int row = 0; row < rows; row += 4)
        for (int column = 0; column < columns; column += LANES) {
            const vi four = (vi)load(words + (row / 4 * columns + column) * 4);
#pragma GCC unroll 4
            for (int byte = 0; byte < 4; byte++)
                store(out + (row + byte) * columns + column,
                      __builtin_convertvector((four << (24 - 8 * byte)) >> 24, vf));
        }
}

void int8_widen(const uint8_t *unit, int dim, int is_value, float *out) {
    if (is_value)
        widen(unit, BLOCK, dim, out);
    else
        widen(unit, dim, BLOCK, out);
}

/* -- with VNNI ------------------------------------------------------------------------------ */

#if HAS_VNNI
#define ROWS 6          /* rows at once: 24 sums */
#define NEGLIGIBLE 1e-30f

INLINE float largest_of(const float *x, int count) {
    __m512 most = _mm512_setzero_ps();
    for (int i = 0; i < count; i += 16)
        most = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x + i)), most);
    return _mm512_reduce_max_ps(most);
}

void int8_query(const float *q, int dim, int8_t *limbs, Int8Row *row) {
    const float largest = largest_of(q, dim);
    const float inverse = largest > NEGLIGIBLE ? 32512.0f / largest : 0.0f;
    const __m512i bias = _mm512_set1_epi32(128), byte = _mm512_set1_epi32(255);
    __m512i high_sum = _mm512_setzero_si512(), low_sum = _mm512_setzero_si512();
    __m512 poison = _mm512_setzero_ps(); /* stays 0 unless a value is no number */
    for (int d = 0; d < dim; d += 16) {
        const __m512 x = _mm512_loadu_ps(q + d);
        poison = _mm512_add_ps(poison, _mm512_mul_ps(x, _mm512_setzero_ps()));
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
        const __m512i low =
            _mm512_sub_epi32(_mm512_and_si512(_mm512_add_epi32(whole, bias), byte), bias);
        const __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(whole, low), 8);
        _mm_storeu_si128((__m128i *)(limbs + d), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((__m128i *)(limbs + dim + d), _mm512_cvtepi32_epi8(low));
        high_sum = _mm512_add_epi32(high_sum, high);
        low_sum = _mm512_add_epi32(low_sum, low);
    }
    row->scale = (largest > NEGLIGIBLE ? largest / 32512.0f : 0.0f) + sum_of((vf)poison);
    /* Keys are multiplied as 128 + k, which is not negative. */
    row->start[0] = -128 * _mm512_reduce_add_epi32(high_sum);
    row->start[1] = -128 * _mm512_reduce_add_epi32(low_sum);
}

INLINE vi four_bytes(const void *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return (vi){0} + word;
}

/* Sums are of the type vi: with __m512i gcc copies each before and after the instruction. `a` is
 * without signs, `b` with. */
INLINE vi add_products(vi sum, vi a, vi b) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}

INLINE vf joined(vi high, vi low) {
    return __builtin_convertvector(high, vf) * 256.0f + __builtin_convertvector(low, vf);
}

/* Scores of `rows` rows and the keys of two blocks. */
INLINE void score_two(const int rows, const int8_t *limbs, const Int8Row *row,
                      const uint32_t *const *k, int dim, const float *scales, float *scores) {
    const vi flip = (vi){0} + (int32_t)0x80808080u;
    vi acc[ROWS * 4];
#pragma GCC unroll 24
    for (int i = 0; i < rows * 4; i++) acc[i] = (vi){0} + row[i / 4].start[i / 2 % 2];
#pragma GCC unroll 1
    for (int d = 0; d < dim; d += 4) {
        const vi a = (vi)load(k[0] + d * BLOCK / 4) ^ flip;
        const vi b = (vi)load(k[1] + d * BLOCK / 4) ^ flip;
#pragma GCC unroll 12
        for (int limb = 0; limb < rows * 2; limb++) {
            const vi x = four_bytes(limbs + limb * dim + d);
            acc[limb * 2] = add_products(acc[limb * 2], a, x);
            acc[limb * 2 + 1] = add_products(acc[limb * 2 + 1], b, x);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const vf scale = load(scales + i * BLOCK) * row[r].scale;
            store(scores + r * TILE + i * BLOCK,
                  joined(acc[r * 4 + i], acc[r * 4 + 2 + i]) * scale);
        }
}

/* Add to out [rows][dim] the products of `rows` rows of probabilities and 32 channels of values. */
INLINE void add_two(const int rows, const uint8_t *limbs, const float *scale,
                    const uint32_t *const *v, int blocks, int dim, float *out) {
    vi acc[ROWS * 4];
#pragma GCC unroll 24
    for (int i = 0; i < rows * 4; i++) acc[i] = (vi){0};
    for (int block = 0; block < blocks; block++) {
        const uint32_t *words = v[block];
#pragma GCC unroll 1
        for (int four = 0; four < BLOCK / 4; four++, words += dim, limbs += 4) {
            const vi a = (vi)load(words), b = (vi)load(words + 16);
#pragma GCC unroll 12
            for (int limb = 0; limb < rows * 2; limb++) {
                const vi x = four_bytes(limbs + limb * TILE);
                acc[limb * 2] = add_products(acc[limb * 2], x, a);
                acc[limb * 2 + 1] = add_products(acc[limb * 2 + 1], x, b);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            float *to = out + r * dim + i * 16;
            store(to, load(to) + joined(acc[r * 4 + i], acc[r * 4 + 2 + i]) * scale[r]);
        }
}

#define EACH(CALL) CALL(1) CALL(2) CALL(3) CALL(4) CALL(5) CALL(6)

#define SCORES(N)                                                        \
    case N:                                                              \
        score_two(N, limbs, row, k, dim, scales, scores);                \
        break;
static void int8_score_rows(int rows, const int8_t *limbs, const Int8Row *row,
                            const uint32_t *const *k, int dim, const float *scales,
                            float *scores) {
    switch (rows) { EACH(SCORES) }
}

#define VALUES(N)                                                        \
    case N:                                                              \
        add_two(N, limbs, scale, v, blocks, dim, out);                   \
        break;
static void int8_value_rows(int rows, const uint8_t *limbs, const float *scale,
                            const uint32_t *const *v, int blocks, int dim, float *out) {
    switch (rows) { EACH(VALUES) }
}

void int8_scores(const int8_t *limbs, const Int8Row *row, const uint32_t *const *k, int blocks,
                 int rows, int dim, float *scores) {
    float scales[TILE + BLOCK] ALIGNED;
    for (int i = 0; i <= blocks && i <= TILE / BLOCK; i++)
        int8_scales((const uint8_t *)k[i], dim, scales + i * BLOCK);
    for (int column = 0; column < blocks; column += 2)
        for (int r = 0, count; r < rows; r += count) {
            count = rows - r < ROWS ? rows - r : ROWS;
            int8_score_rows(count, limbs + (size_t)2 * r * dim, row + r, k + column, dim,
                            scales + column * BLOCK, scores + r * TILE + column * BLOCK);
        }
}

/* Round a row of probabilities times the values' scales to two limbs [2][TILE]; return its scale. */
INLINE float cut_probabilities(const float *p, const float *scales, uint8_t *limbs) {
    __m512 x[TILE / 16], most = _mm512_setzero_ps();
    for (int i = 0; i < TILE / 16; i++) {
        x[i] = _mm512_mul_ps(_mm512_loadu_ps(p + 16 * i), _mm512_loadu_ps(scales + 16 * i));
        most = _mm512_max_ps(x[i], most);
    }
    const float largest = _mm512_reduce_max_ps(most);
    const float inverse = largest > NEGLIGIBLE ? 65535.0f / largest : 0.0f;
    const __m512i byte = _mm512_set1_epi32(255);
    for (int i = 0; i < TILE / 16; i++) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], _mm512_set1_ps(inverse)));
        _mm_storeu_si128((__m128i *)(limbs + 16 * i),
                         _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
        _mm_storeu_si128((__m128i *)(limbs + TILE + 16 * i),
                         _mm512_cvtepi32_epi8(_mm512_and_si512(whole, byte)));
    }
    return largest > NEGLIGIBLE ? largest / 65535.0f : 0.0f;
}

void int8_values(const float *p, const uint32_t *const *v, int blocks, int rows, int dim,
                 float *out) {
    float scales[TILE] ALIGNED = {0};
    for (int i = 0; i < blocks; i++) int8_scales((const uint8_t *)v[i], dim, scales + i * BLOCK);
    for (int r = 0, count; r < rows; r += count) {
        uint8_t limbs[ROWS * 2 * TILE] ALIGNED;
        float scale[ROWS];
        count = rows - r < ROWS ? rows - r : ROWS;
        for (int i = 0; i < count; i++)
            scale[i] = cut_probabilities(p + (size_t)(r + i) * TILE, scales, limbs + 2 * i * TILE);
        for (int column = 0; column < dim; column += 32) {
            const uint32_t *words[TILE / BLOCK];
            for (int i = 0; i < blocks; i++) words[i] = v[i] + column;
            int8_value_rows(count, limbs, scale, words, blocks, dim, out + r * dim + column);
        }
    }
}
#endif
