/* Weights of 4 bits with a scale and a minimum for each 32 values of a column: code * scale +
 * minimum, as GGUF's Q4_0, Q4_1 and Q4_K have them. A panel of 16 columns has for each group
 *
 *     16 words   the columns' scales (low halves) and minima (high halves), fp16
 *     4 x 16 words, each 8 codes of a column: nibble i and nibble i + 4 are a pair of k
 *
 * Codes are exact in bf16, so the products of a group are summed with these, and the sum is
 * multiplied by the scale; the minimum is multiplied by the sum of the group's activations. No
 * weight is rounded, and the order is the same for any number of rows.
 */
#include "cpu.h"

#if HAS_DOT
#define GROUP 32
#define GROUP_WORDS (5 * PANEL)
#define AHEAD_WORDS (4 * GROUP_WORDS) /* asked for before their turn */

size_t int4_words(int depth) { return (size_t)(depth / GROUP) * GROUP_WORDS; }

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

/* Write the sums of each group of the rows, [rows][depth / 32]. */
void int4_sums(const uint32_t *a, size_t lda, int rows, int depth, float *sums) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < depth / GROUP; g++) {
            const __m512bh x = (__m512bh)_mm512_loadu_si512(a + r * lda + g * (GROUP / 2));
            *sums++ = _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), x, ones));
        }
}

size_t int4_unpacked_words(int depth) {
    return ((size_t)depth / 2 + 2 * (size_t)(depth / GROUP)) * PANEL;
}

/* Write the codes of a panel to out in PAIRS, [depth / 2][16] words, and behind them each group's
 * scales and minima, [depth / 32][2][16] fp32. */
void unpack_int4(const uint32_t *panel, int depth, uint32_t *out) {
    const __m512i table = table_of_codes();
    float *factors = (float *)(out + (size_t)depth / 2 * PANEL);
    for (int g = 0; g < depth / GROUP; g++, panel += GROUP_WORDS, factors += 2 * PANEL) {
        const __m512i both = _mm512_loadu_si512(panel);
        _mm512_storeu_ps(factors, half_of(both));
        _mm512_storeu_ps(factors + PANEL, half_of(_mm512_srli_epi32(both, 16)));
        for (int chunk = 1; chunk <= 4; chunk++) {
            __m512i w = _mm512_loadu_si512(panel + chunk * PANEL);
            for (int i = 0; i < 4; i++, w = _mm512_srli_epi16(w, 4), out += PANEL)
                _mm512_storeu_si512(out, _mm512_permutexvar_epi16(w, table));
        }
    }
}

/* Add the products of the pairs at nibble I. */
#define ADD_LINE(I)                                                                           \
    {                                                                                         \
        __m512bh line[4];                                                                     \
        _Pragma("GCC unroll 4") for (int v = 0; v < panels; v++)                              \
            line[v] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(w[v], 4 * (I)),    \
                                                         table);                              \
        _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {                              \
            int word;                                                                         \
            memcpy(&word, x + r * lda + (I), 4);                                              \
            const __m512bh both = (__m512bh)_mm512_set1_epi32(word);                          \
            _Pragma("GCC unroll 4") for (int v = 0; v < panels; v++)                          \
                acc[r * panels + v] = _mm512_dpbf16_ps(acc[r * panels + v], both, line[v]);   \
        }                                                                                     \
    }

/* Multiply codes as they are unpacked. */
INLINE void few_rows(const int rows, const int panels, const uint32_t *a, size_t lda,
                     const float *sums, const uint32_t *b, int depth, float *out) {
    const __m512i table = table_of_codes();
    const size_t panel = int4_words(depth);
    const int groups = depth / GROUP;
    __m512 total[8];
#pragma GCC unroll 8
    for (int i = 0; i < rows * panels; i++) total[i] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (int g = 0; g < groups; g++, b += GROUP_WORDS) {
        __m512 acc[8];
#pragma GCC unroll 8
        for (int i = 0; i < rows * panels; i++) acc[i] = _mm512_setzero_ps();
#pragma GCC unroll 1
        for (int chunk = 0; chunk < 4; chunk++) {
            const uint32_t *x = a + g * (GROUP / 2) + chunk * 4;
            __m512i w[4];
#pragma GCC unroll 4
            for (int v = 0; v < panels; v++) {
                const uint32_t *line = b + v * panel + (1 + chunk) * PANEL;
                _mm_prefetch((const char *)(line + AHEAD_WORDS), _MM_HINT_T1);
                w[v] = _mm512_loadu_si512(line);
            }
            ADD_LINE(0)
            ADD_LINE(1)
            ADD_LINE(2)
            ADD_LINE(3)
        }
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
INLINE void many_rows(const int rows, const uint32_t *a, size_t lda, const float *sums,
                      const uint32_t *codes, int depth, float *out) {
    const size_t unpacked = int4_unpacked_words(depth);
    const float *factors = (const float *)(codes + (size_t)depth / 2 * PANEL);
    const int groups = depth / GROUP;
    vf total[12];
    clear(total, 2 * rows);
#pragma GCC unroll 1
    for (int g = 0; g < groups; g++, factors += 2 * PANEL) {
        vf acc[12];
        clear(acc, 2 * rows);
#pragma GCC unroll 2
        for (int p = g * (GROUP / 2); p < (g + 1) * (GROUP / 2); p++) {
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

void int4_few(const uint32_t *a, size_t lda, const float *sums, const uint32_t *b, int rows,
              int depth, float *out, int width) {
    if (rows == 1 && width == 64)
        few_rows(1, 4, a, lda, sums, b, depth, out);
    else if (rows == 2 && width == 64)
        few_rows(2, 4, a, lda, sums, b, depth, out);
    else if (rows == 1)
        few_rows(1, 2, a, lda, sums, b, depth, out);
    else if (rows == 2)
        few_rows(2, 2, a, lda, sums, b, depth, out);
    else if (rows == 3)
        few_rows(3, 2, a, lda, sums, b, depth, out);
    else
        few_rows(4, 2, a, lda, sums, b, depth, out);
}

#define CASE(ROWS)                                                     \
    case ROWS:                                                         \
        many_rows(ROWS, a, lda, sums, codes, depth, out);              \
        return;

void int4_many(const uint32_t *a, size_t lda, const float *sums, const uint32_t *codes, int rows,
               int depth, float *out) {
    for (; rows > 6; rows -= 6, a += 6 * lda, sums += 6 * (depth / GROUP), out += 6 * 64)
        many_rows(6, a, lda, sums, codes, depth, out);
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}
#else
size_t int4_words(int depth) { return (size_t)depth; } /* never multiplied here */
#endif
