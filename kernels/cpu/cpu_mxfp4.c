/* MXFP4 weights: 4 bits a value, kept as they are published and unpacked for each tile.
 *
 * A group of 32 values of a column has one exponent; a value is (-1)^s * {0, .5, 1, 1.5, 2, 3, 4, 6}
 * times 2^exponent, which bf16 holds exactly. A panel of 16 columns has for each group
 *
 *     16 bytes   the exponents of the columns, plus 127
 *     4 x 16 words, each 8 values of a column: nibble i and nibble i + 4 are a pair of k
 *
 * so that a shift and a table make a line of PAIRS.
 */
#include "cpu.h"

#define GROUP 32
#define GROUP_WORDS (PANEL / 4 + 4 * PANEL)
#define HALF_BITS 0x3f00 /* bf16 of 0.5 */

size_t mxfp4_words(int depth) { return (size_t)(depth / GROUP) * GROUP_WORDS; }

/* Write the nibbles of a column's group and its exponent to a panel; return 0 if the values are no
 * MXFP4. `values`: bf16. */
static int pack_group(const uint16_t *values, uint32_t *group, int lane) {
    int top = 0;
    for (int k = 0; k < GROUP; k++) {
        const int exponent = values[k] >> 7 & 0xff;
        if ((values[k] & 0x7fff) && !exponent) return 0;
        top = exponent > top ? exponent : top;
    }
    if (top > 250 || (top && top < 8)) return 0;
    const int shift = top ? top - 129 : 0; /* the largest magnitude becomes 4 or 6 */
    ((uint8_t *)group)[lane] = (uint8_t)(shift + 127);
    for (int k = 0; k < GROUP; k++) {
        const int magnitude = values[k] & 0x7fff;
        uint32_t code = 0;
        if (magnitude) {
            const int above = magnitude - shift * 128 - HALF_BITS;
            if (above < 0 || above % 64 || above == 64) return 0;
            code = above ? (uint32_t)above / 64 : 1;
        }
        code |= (uint32_t)(values[k] >> 15) << 3;
        const int pair = k % 8 / 2, nibble = pair + k % 2 * 4;
        group[PANEL / 4 + k / 8 * PANEL + lane] |= code << (4 * nibble);
    }
    return 1;
}

/* Write weight [columns, depth] bf16 to b in panels of MXFP4, as `pack` does in full. Return 0 where
 * a value cannot be held exactly; b is then garbage. `depth` is a multiple of 32. */
int pack_mxfp4(const uint16_t *weight, uint32_t *b, const int32_t *from, int count, int depth) {
    memset(b, 0, (size_t)(count / PANEL) * mxfp4_words(depth) * 4);
    for (int column = 0; column < count; column++) {
        uint32_t *panel = b + (size_t)(column / PANEL) * mxfp4_words(depth);
        if (from[column] < 0) continue;
        const uint16_t *row = weight + (size_t)from[column] * (size_t)depth;
        for (int k = 0; k < depth; k += GROUP)
            if (!pack_group(row + k, panel + (size_t)(k / GROUP) * GROUP_WORDS, column % PANEL))
                return 0;
    }
    return 1;
}

#if defined(__AVX512BW__)
/* Return the bf16 of the 8 codes and their negatives, twice: an index's fifth bit does not matter. */
INLINE __m512i table_of_codes(void) {
    const short h = (short)0x8000;
    return _mm512_set_epi16(
        h + 0x40c0, h + 0x4080, h + 0x4040, h + 0x4000, h + 0x3fc0, h + 0x3f80, h + 0x3f00, h,
        0x40c0, 0x4080, 0x4040, 0x4000, 0x3fc0, 0x3f80, 0x3f00, 0,
        h + 0x40c0, h + 0x4080, h + 0x4040, h + 0x4000, h + 0x3fc0, h + 0x3f80, h + 0x3f00, h,
        0x40c0, 0x4080, 0x4040, 0x4000, 0x3fc0, 0x3f80, 0x3f00, 0);
}

/* Return what a group's exponents add to the bits of both values of a word. */
INLINE __m512i exponents_of(const uint32_t *group) {
    __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)group));
    e = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(127)), 7);
    return _mm512_or_si512(_mm512_and_si512(e, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(e, 16));
}

/* Return a line of PAIRS from the lowest nibble of each 16 bits of `words`. */
INLINE __m512i line_of(__m512i words, __m512i table, __m512i exponents) {
    const __m512i v = _mm512_permutexvar_epi16(words, table);
    const __mmask32 some = _mm512_test_epi16_mask(v, _mm512_set1_epi16(0x7fff));
    return _mm512_mask_add_epi16(v, some, v, exponents);
}

/* Write 4 lines of PAIRS. */
INLINE void unpack_lines(const uint32_t *words, const uint32_t *group, uint32_t *out) {
    const __m512i table = table_of_codes(), e = exponents_of(group);
    __m512i w = _mm512_loadu_si512(words);
    for (int i = 0; i < 4; i++, w = _mm512_srli_epi16(w, 4))
        _mm512_storeu_si512(out + i * PANEL, line_of(w, table, e));
}
#else
/* Return the bf16 of nibbles, times 2^exponent; `shift`: the exponents times 128. */
INLINE vu value_of(vu nibble, vu shift) {
    const vu magnitude = nibble & 7;
    const vu half = (vu)(magnitude == 1), some = (vu)(magnitude != 0);
    const vu bits = HALF_BITS + magnitude * 64 - (half & 64) + shift;
    return (bits & some & 0x7fff) | (nibble & 8) << 12;
}

INLINE void unpack_lines(const uint32_t *words, const uint32_t *group, uint32_t *out) {
    const uint8_t *exponents = (const uint8_t *)group;
    for (int at = 0; at < PANEL; at += LANES) {
        vu shift, w = (vu)load(words + at);
        for (int i = 0; i < LANES; i++) shift[i] = ((uint32_t)exponents[at + i] - 127) * 128;
        for (int i = 0; i < 4; i++) {
            const vu low = value_of(w >> (4 * i) & 15, shift);
            const vu high = value_of(w >> (16 + 4 * i) & 15, shift);
            store(out + i * PANEL + at, (vf)(low | high << 16));
        }
    }
}
#endif

/* Write a panel of MXFP4 to out in PAIRS, [depth / 2][16] words. */
void unpack_mxfp4(const uint32_t *panel, int depth, uint32_t *out) {
    for (int k = 0; k < depth; k += GROUP, panel += GROUP_WORDS)
        for (int chunk = 0; chunk < 4; chunk++, out += 4 * PANEL)
            unpack_lines(panel + PANEL / 4 + chunk * PANEL, panel, out);
}

#if HAS_DOT
/* Multiply lines as they are unpacked, in the order of `multiply`: the sums have the same bits. */
INLINE void multiply_packed(const int rows, const int panels, const float *a, size_t lda,
                            const uint32_t *b, int depth, float *out) {
    const __m512i table = table_of_codes();
    __m512 acc[16];
    for (int i = 0; i < rows * panels; i++) acc[i] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (int k = 0; k < depth / 2; k += GROUP / 2, b += GROUP_WORDS) {
        __m512i e[4];
#pragma GCC unroll 4
        for (int v = 0; v < panels; v++) e[v] = exponents_of(b + (size_t)v * mxfp4_words(depth));
#pragma GCC unroll 1
        for (int chunk = 0; chunk < 4; chunk++) {
            __m512i w[4];
#pragma GCC unroll 4
            for (int v = 0; v < panels; v++)
                w[v] = _mm512_loadu_si512(b + (size_t)v * mxfp4_words(depth) + PANEL / 4 +
                                          chunk * PANEL);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                __m512bh line[4];
#pragma GCC unroll 4
                for (int v = 0; v < panels; v++) {
                    line[v] = (__m512bh)line_of(w[v], table, e[v]);
                    w[v] = _mm512_srli_epi16(w[v], 4);
                }
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    int word;
                    memcpy(&word, a + r * lda + k + chunk * 4 + i, 4);
                    const __m512bh x = (__m512bh)_mm512_set1_epi32(word);
#pragma GCC unroll 4
                    for (int v = 0; v < panels; v++)
                        acc[r * panels + v] = _mm512_dpbf16_ps(acc[r * panels + v], x, line[v]);
                }
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < panels; v++)
            _mm512_storeu_ps(out + r * 64 + v * PANEL, acc[r * panels + v]);
}

#define CASE(ROWS)                                            \
    case ROWS:                                                \
        if (width == 64)                                      \
            multiply_packed(ROWS, 4, a, lda, b, depth, out);  \
        else                                                  \
            multiply_packed(ROWS, 2, a, lda, b, depth, out);  \
        break;

void mxfp4_product(const float *a, size_t lda, const uint32_t *b, int rows, int depth, float *out,
                   int width) {
    switch (rows) {
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
    }
}
#endif
