/* Weights in codes of 4 or 8 bits with a scale and a minimum for each group of a column's values:
 * code * scale + minimum, as GGUF's types have them. A panel of 16 columns has for each group
 *
 *     16 words   the columns' scales (low halves) and minima (high halves), fp16
 *     the codes, of 4 bits in 4 x 16 words, each 8 codes of a column: nibble i and nibble i + 4 are
 *     a pair of k; of 8 bits (signed) in lines of 32 bytes, each a pair of k of the 16 columns
 *
 * Codes are exact in bf16, so the products of a group are summed with these, and the sum is
 * multiplied by the scale; the minimum is multiplied by the sum of the group's activations. No
 * weight is rounded, and the order is the same for any number of rows.
 */
#include "cpu.h"

int has_codes(int packing) { return packing >= INT4; }

size_t codes_words(int packing, int depth) {
    return (size_t)(depth / group_of(packing)) * group_words(packing);
}

#if HAS_DOT
#define AHEAD_WORDS 320 /* asked for before their turn */
/* Return the bf16 of the 16 codes, twice: an index's fifth bit does not matter. */
INLINE __m512i table_of_codes(void) {
    return _mm512_set_epi16(
        0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0,
        0x4080, 0x4040, 0x4000, 0x3f80, 0, 0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110,
        0x4100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0);
}

INLINE __m512 half_of(__m512i words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }

/* Return total + acc * scale + sum * minimum of a group's columns. */
INLINE __m512 fold(__m512 total, __m512 acc, __m512 scale, __m512 minimum, float sum) {
    total = _mm512_fmadd_ps(acc, scale, total);
    return _mm512_fmadd_ps(_mm512_set1_ps(sum), minimum, total);
}

/* Return the pairs of bf16 of a line of 32 signed bytes. */
INLINE __m512i line_of_bytes(const void *bytes) {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
    const __m128i next = _mm_loadu_si128((const __m128i *)bytes + 1);
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(next));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

void codes_sums(int packing, const uint32_t *a, size_t lda, int rows, int depth, float *sums) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    const int pairs = group_of(packing) / 2;
    const __mmask16 words = (__mmask16)((1u << pairs) - 1);
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < depth / 2; p += pairs) {
            const __m512bh x = (__m512bh)_mm512_maskz_loadu_epi32(words, a + r * lda + p);
            *sums++ = _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), x, ones));
        }
}

size_t codes_unpacked_words(int packing, int depth) {
    return ((size_t)depth / 2 + 2 * (size_t)(depth / group_of(packing))) * PANEL;
}

/* Write the codes of a panel to out in PAIRS, [depth / 2][16] words, and behind them each group's
 * scales and minima, [groups][2][16] fp32. */
void unpack_codes(int packing, const uint32_t *panel, int depth, uint32_t *out) {
    const __m512i table = table_of_codes();
    float *factors = (float *)(out + (size_t)depth / 2 * PANEL);
    for (int g = 0; g < depth / group_of(packing); g++, factors += 2 * PANEL) {
        const __m512i both = _mm512_loadu_si512(panel);
        const uint32_t *codes = panel + PANEL;
        panel += group_words(packing);
        _mm512_storeu_ps(factors, half_of(both));
        _mm512_storeu_ps(factors + PANEL, half_of(_mm512_srli_epi32(both, 16)));
        if (packing != INT4)
            for (; codes < panel; codes += PANEL / 2, out += PANEL)
                _mm512_storeu_si512(out, line_of_bytes(codes));
        for (; codes < panel; codes += PANEL) {
            __m512i w = _mm512_loadu_si512(codes);
            for (int i = 0; i < 4; i++, w = _mm512_srli_epi16(w, 4), out += PANEL)
                _mm512_storeu_si512(out, _mm512_permutexvar_epi16(w, table));
        }
    }
}

/* Add the products of the word at x of each row and a line of pairs of each panel. */
INLINE void add_line(const int rows, const int panels, __m512 *acc, const uint32_t *x, size_t lda,
                     const __m512bh *line) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        int word;
        memcpy(&word, x + r * lda, 4);
        const __m512bh both = (__m512bh)_mm512_set1_epi32(word);
#pragma GCC unroll 4
        for (int v = 0; v < panels; v++)
            acc[r * panels + v] = _mm512_dpbf16_ps(acc[r * panels + v], both, line[v]);
    }
}

/* Add the products of a group of 4 bits, whose panels are `panel` words apart. */
INLINE void add_nibbles(const int rows, const int panels, __m512 *acc, const uint32_t *x,
                        size_t lda, const uint32_t *codes, size_t panel) {
    const __m512i table = table_of_codes();
#pragma GCC unroll 1
    for (int chunk = 0; chunk < 4; chunk++, x += 4, codes += PANEL) {
        __m512i w[4];
#pragma GCC unroll 4
        for (int v = 0; v < panels; v++) {
            _mm_prefetch((const char *)(codes + v * panel + AHEAD_WORDS), _MM_HINT_T1);
            w[v] = _mm512_loadu_si512(codes + v * panel);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m512bh line[4];
#pragma GCC unroll 4
            for (int v = 0; v < panels; v++)
                line[v] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(w[v], 4 * i), table);
            add_line(rows, panels, acc, x + i, lda, line);
        }
    }
}

/* Add the products of a group of 8 bits. */
INLINE void add_bytes(const int rows, const int panels, __m512 *acc, const uint32_t *x, size_t lda,
                      const uint32_t *codes, size_t panel, const int pairs) {
#pragma GCC unroll 2
    for (int p = 0; p < pairs; p++, codes += PANEL / 2) {
        __m512bh line[4];
#pragma GCC unroll 4
        for (int v = 0; v < panels; v++) {
            if (p % 2 == 0)
                _mm_prefetch((const char *)(codes + v * panel + AHEAD_WORDS), _MM_HINT_T1);
            line[v] = (__m512bh)line_of_bytes(codes + v * panel);
        }
        add_line(rows, panels, acc, x + p, lda, line);
    }
}

/* Multiply codes as they are unpacked. */
INLINE void few_rows(const int packing, const int rows, const int panels, const uint32_t *a,
                     size_t lda, const float *sums, const uint32_t *b, int depth, float *out) {
    const int pairs = group_of(packing) / 2, groups = codes_groups(packing, depth);
    const size_t panel = codes_words(packing, depth);
    __m512 total[8];
#pragma GCC unroll 8
    for (int i = 0; i < rows * panels; i++) total[i] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (int g = 0; g < groups; g++, a += pairs, b += group_words(packing)) {
        __m512 acc[8];
#pragma GCC unroll 8
        for (int i = 0; i < rows * panels; i++) acc[i] = _mm512_setzero_ps();
        if (packing == INT4)
            add_nibbles(rows, panels, acc, a, lda, b + PANEL, panel);
        else
            add_bytes(rows, panels, acc, a, lda, b + PANEL, panel, pairs);
#pragma GCC unroll 4
        for (int v = 0; v < panels; v++) {
            const __m512i both = _mm512_loadu_si512(b + v * panel);
            const __m512 scale = half_of(both), minimum = half_of(_mm512_srli_epi32(both, 16));
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                total[r * panels + v] = fold(total[r * panels + v], acc[r * panels + v], scale,
                                             minimum, sums[r * groups + g]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < panels; v++)
            _mm512_storeu_ps(out + r * 64 + v * PANEL, total[r * panels + v]);
}

/* Multiply up to 6 rows by two panels, unpacked behind each other. Of more rows the sums of a group
 * and of all groups would not fit the registers together. */
INLINE void many_rows(const int packing, const int rows, const uint32_t *a, size_t lda,
                      const float *sums, const uint32_t *codes, int depth, float *out) {
    const size_t unpacked = codes_unpacked_words(packing, depth);
    const float *factors = (const float *)(codes + (size_t)depth / 2 * PANEL);
    const int groups = codes_groups(packing, depth), pairs = group_of(packing) / 2;
    vf total[12];
    clear(total, 2 * rows);
#pragma GCC unroll 1
    for (int g = 0; g < groups; g++, factors += 2 * PANEL) {
        vf acc[12];
        clear(acc, 2 * rows);
#pragma GCC unroll 2
        for (int p = g * pairs; p < (g + 1) * pairs; p++) {
            const __m512bh first = (__m512bh)_mm512_loadu_si512(codes + (size_t)p * PANEL);
            const __m512bh second =
                (__m512bh)_mm512_loadu_si512(codes + unpacked + (size_t)p * PANEL);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                int word;
                memcpy(&word, a + r * lda + p, 4);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(word);
                acc[2 * r] = (vf)_mm512_dpbf16_ps((__m512)acc[2 * r], x, first);
                acc[2 * r + 1] = (vf)_mm512_dpbf16_ps((__m512)acc[2 * r + 1], x, second);
                hold(acc + 2 * r, 2);
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            const __m512 scale = _mm512_loadu_ps(factors + v * unpacked);
            const __m512 minimum = _mm512_loadu_ps(factors + v * unpacked + PANEL);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++)
                total[2 * r + v] = (vf)fold((__m512)total[2 * r + v], (__m512)acc[2 * r + v],
                                            scale, minimum, sums[r * groups + g]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) store(out + r * 64 + v * PANEL, total[2 * r + v]);
}

INLINE void few_of(const int packing, const uint32_t *a, size_t lda, const float *sums,
                   const uint32_t *b, int rows, int depth, float *out, int width) {
    if (rows == 1 && width == 64)
        few_rows(packing, 1, 4, a, lda, sums, b, depth, out);
    else if (rows == 2 && width == 64)
        few_rows(packing, 2, 4, a, lda, sums, b, depth, out);
    else if (rows == 1)
        few_rows(packing, 1, 2, a, lda, sums, b, depth, out);
    else if (rows == 2)
        few_rows(packing, 2, 2, a, lda, sums, b, depth, out);
    else if (rows == 3)
        few_rows(packing, 3, 2, a, lda, sums, b, depth, out);
    else
        few_rows(packing, 4, 2, a, lda, sums, b, depth, out);
}

void codes_few(int packing, const uint32_t *a, size_t lda, const float *sums, const uint32_t *b,
               int rows, int depth, float *out, int width) {
    if (packing == INT4)
        few_of(INT4, a, lda, sums, b, rows, depth, out, width);
    else if (packing == INT8)
        few_of(INT8, a, lda, sums, b, rows, depth, out, width);
    else
        few_of(INT8_16, a, lda, sums, b, rows, depth, out, width);
}

#define CASE(ROWS)                                                     \
    case ROWS:                                                         \
        many_rows(packing, ROWS, a, lda, sums, codes, depth, out);     \
        return;

INLINE void many_of(const int packing, const uint32_t *a, size_t lda, const float *sums,
                    const uint32_t *codes, int rows, int depth, float *out) {
    const int groups = codes_groups(packing, depth);
    for (; rows > 6; rows -= 6, a += 6 * lda, sums += 6 * groups, out += 6 * 64)
        many_rows(packing, 6, a, lda, sums, codes, depth, out);
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}

void codes_many(int packing, const uint32_t *a, size_t lda, const float *sums,
                const uint32_t *codes, int rows, int depth, float *out) {
    if (packing == INT8_16)
        many_of(INT8_16, a, lda, sums, codes, rows, depth, out);
    else /* unpacked, the others are the same */
        many_of(INT8, a, lda, sums, codes, rows, depth, out);
}

#endif

#if HAS_CODES
/* Write the values of column `lane` of a panel of 8 bits. */
void unpack_column(int packing, const uint32_t *panel, int lane, int depth, float *out) {
    for (int g = 0; g < codes_groups(packing, depth); g++, panel += group_words(packing)) {
        const int8_t *codes = (const int8_t *)(panel + PANEL) + 2 * lane;
        const float scale = _cvtsh_ss((uint16_t)panel[lane]);
        const float minimum = _cvtsh_ss((uint16_t)(panel[lane] >> 16));
        for (int k = 0; k < group_of(packing); k++)
            *out++ = codes[k / 2 * 32 + k % 2] * scale + minimum;
    }
}
#endif
