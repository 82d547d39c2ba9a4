/* Products of codes of 4 and 8 bits (the panels of cpu_codes.c) by AVX2, where the CPU multiplies no
 * pairs of bf16. A row is rounded to 16 bits with a scale for each group of the weight's, finer than
 * bf16 for all but outliers of more than a hundred times their group. So a group's products are
 * sums of integers, exact in any order, at two products an instruction and lane; the scales and
 * minima are applied to the sums in fp32, group by group, in the same order for any number of rows.
 */
#include "cpu.h"

#if HAS_MADD
#define AHEAD_WORDS 320   /* asked for before their turn */
#define ROUNDED_MAX 32767 /* of a row's integers */
#define TINY 1e-30f       /* rows of smaller values are zeros: the inverse would be infinite */

INLINE __m256i words_at(const uint32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }

/* Return the pair of a row's word in all lanes. */
INLINE __m256i pair_of(const uint32_t *x) {
    int word;
    memcpy(&word, x, 4);
    return _mm256_set1_epi32(word);
}

/* Return the pairs of 8 columns of a line of signed bytes. */
INLINE __m256i line_of_bytes(const uint32_t *codes) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes));
}

/* Return pairs 0, 1, 2 or 3 of a chunk of nibbles. */
INLINE __m256i line_of_nibbles(__m256i words, const int i) {
    const __m256i shifted = i ? _mm256_srli_epi16(words, 4 * i) : words;
    return i == 3 ? shifted : _mm256_and_si256(shifted, _mm256_set1_epi16(15));
}

/* Write the scales and the minima of 8 columns, whose words begin a group. */
INLINE void factors_of(const uint32_t *words, __m256 *scale, __m256 *minimum) {
    const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)words));
    const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)words + 1));
    const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0x88));
    const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0xdd));
    *scale = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
    *minimum = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
}

/* Add to out [8] the products of a group: `row` has its scale and the sum of its values. */
INLINE void fold(float *out, __m256i acc, const float *row, __m256 scale, __m256 minimum) {
    const __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(row));
    const __m256 total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc), both, _mm256_loadu_ps(out));
    _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_broadcast_ss(row + 1), minimum, total));
}

/* Keep sums of integers in registers, as `hold` does. */
INLINE void hold_whole(__m256i *sums, const int count) {
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) __asm__ volatile("" : "+x"(sums[i]) : : "memory");
}

INLINE void add_products(__m256i *acc, __m256i line, __m256i x) {
    *acc = _mm256_add_epi32(*acc, _mm256_madd_epi16(line, x));
}

/* Round a group of x; write its pairs, and its scale and sum. */
INLINE void round_group(const int size, const float *x, uint32_t *out, float *factors) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256(), sum = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int i = 0; i < size; i += 8) /* as integers: infinities and NaN are the largest */
        most = _mm256_max_epi32(most, _mm256_and_si256(magnitude, words_at((const uint32_t *)x + i)));
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    const int bits = _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
    float largest;
    memcpy(&largest, &bits, 4);
    const int is_zero = largest < TINY;
    const __m256 inverse = _mm256_set1_ps(is_zero ? 0.0f : ROUNDED_MAX / largest);
#pragma GCC unroll 2
    for (int i = 0; i < size; i += 16) {
        const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
        const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), inverse));
        const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        _mm256_storeu_si256((__m256i *)(out + i / 2), both);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(both, _mm256_set1_epi16(1)));
    }
    half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    factors[0] = is_zero ? 0.0f : largest / ROUNDED_MAX;
    factors[1] = (float)_mm_cvtsi128_si32(half) * factors[0];
}

void codes_rows(int packing, const float *x, uint32_t *out, int rows, int depth) {
    const int groups = codes_groups(packing, depth), size = group_of(packing);
    for (int r = 0; r < rows; r++, x += depth, out += left_words(PAIRS, packing, depth)) {
        float *factors = (float *)(out + depth / 2);
        for (int g = 0; g < groups; g++)
            if (size == 16)
                round_group(16, x + g * 16, out + g * 8, factors + 2 * g);
            else
                round_group(32, x + g * 32, out + g * 16, factors + 2 * g);
    }
}

size_t codes_unpacked_words(int packing, int depth) {
    return ((size_t)depth / 2 + 2 * (size_t)codes_groups(packing, depth)) * PANEL;
}

/* Write the codes of a panel to out as pairs of 16-bit integers, [depth / 2][16] words, and behind
 * them each group's scales and minima, [groups][2][16] fp32. */
void unpack_codes(int packing, const uint32_t *panel, int depth, uint32_t *out) {
    float *factors = (float *)(out + (size_t)depth / 2 * PANEL);
    for (int g = 0; g < codes_groups(packing, depth); g++, factors += 2 * PANEL) {
        const uint32_t *codes = panel + PANEL;
        for (int v = 0; v < PANEL; v += 8) {
            __m256 scale, minimum;
            factors_of(panel + v, &scale, &minimum);
            _mm256_storeu_ps(factors + v, scale);
            _mm256_storeu_ps(factors + PANEL + v, minimum);
        }
        panel += group_words(packing);
        if (packing != INT4)
            for (; codes < panel; codes += 4, out += 8)
                _mm256_storeu_si256((__m256i *)out, line_of_bytes(codes));
        for (; codes < panel; codes += PANEL, out += 4 * PANEL)
            for (int v = 0; v < PANEL; v += 8) {
                const __m256i w = words_at(codes + v);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
                    _mm256_storeu_si256((__m256i *)(out + i * PANEL + v), line_of_nibbles(w, i));
            }
    }
}

/* Multiply codes of panels `panel` words apart as they are unpacked; `out` has a row in 64 words. */
INLINE void few_rows(const int packing, const int rows, const int panels, const uint32_t *a,
                     const uint32_t *b, int depth, float *out) {
    const int pairs = group_of(packing) / 2, groups = codes_groups(packing, depth);
    const size_t lda = left_words(PAIRS, packing, depth), panel = codes_words(packing, depth);
    const int vecs = 2 * panels;
    const float *factors = (const float *)(a + depth / 2);
    for (int r = 0; r < rows; r++) memset(out + r * 64, 0, (size_t)panels * PANEL * 4);
#pragma GCC unroll 1
    for (int g = 0; g < groups; g++, a += pairs, factors += 2, b += group_words(packing)) {
        __m256i acc[8];
        const uint32_t *codes = b + PANEL, *x = a;
        /* Behind a panel's end come panels that are read beside it, then those that are read next. */
        const size_t left = panel - (size_t)g * group_words(packing);
        const size_t ahead = AHEAD_WORDS + (left > AHEAD_WORDS ? 0 : (size_t)(panels - 1) * panel);
#pragma GCC unroll 8
        for (int i = 0; i < rows * vecs; i++) acc[i] = _mm256_setzero_si256();
        if (packing == INT4) {
#pragma GCC unroll 1
            for (int chunk = 0; chunk < 4; chunk++, x += 4, codes += PANEL)
#pragma GCC unroll 8
                for (int v = 0; v < vecs; v++) {
                    const uint32_t *from = codes + v / 2 * panel + v % 2 * 8;
                    const __m256i w = words_at(from);
                    if (v % 2 == 0) _mm_prefetch((const char *)(from + ahead), _MM_HINT_T1);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) {
                        const __m256i line = line_of_nibbles(w, i);
#pragma GCC unroll 4
                        for (int r = 0; r < rows; r++) {
                            add_products(acc + r * vecs + v, line, pair_of(x + r * lda + i));
                            hold_whole(acc + r * vecs + v, 1);
                        }
                    }
                }
        } else {
#pragma GCC unroll 2
            for (int p = 0; p < pairs; p++, x++, codes += PANEL / 2)
#pragma GCC unroll 8
                for (int v = 0; v < vecs; v++) {
                    const uint32_t *from = codes + v / 2 * panel + v % 2 * 4;
                    const __m256i line = line_of_bytes(from);
                    if (v % 2 == 0 && p % 2 == 0)
                        _mm_prefetch((const char *)(from + ahead), _MM_HINT_T1);
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++) {
                        add_products(acc + r * vecs + v, line, pair_of(x + r * lda));
                        hold_whole(acc + r * vecs + v, 1);
                    }
                }
        }
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) {
            __m256 scale, minimum;
            factors_of(b + v / 2 * panel + v % 2 * 8, &scale, &minimum);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                fold(out + r * 64 + v * 8, acc[r * vecs + v], factors + r * lda, scale, minimum);
        }
    }
}

/* Multiply up to 6 rows by a panel, unpacked. */
INLINE void many_rows(const int packing, const int rows, const uint32_t *a, const uint32_t *codes,
                      int depth, float *out) {
    const float *factors = (const float *)(codes + (size_t)depth / 2 * PANEL);
    const int groups = codes_groups(packing, depth), pairs = group_of(packing) / 2;
    const size_t lda = left_words(PAIRS, packing, depth);
    const float *own = (const float *)(a + depth / 2);
    for (int r = 0; r < rows; r++) memset(out + r * 64, 0, PANEL * 4);
#pragma GCC unroll 1
    for (int g = 0; g < groups; g++, factors += 2 * PANEL, own += 2) {
        __m256i acc[12];
#pragma GCC unroll 12
        for (int i = 0; i < 2 * rows; i++) acc[i] = _mm256_setzero_si256();
#pragma GCC unroll 2
        for (int p = 0; p < pairs; p++, a++, codes += PANEL) {
            const __m256i first = words_at(codes), second = words_at(codes + 8);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const __m256i x = pair_of(a + r * lda);
                add_products(acc + 2 * r, first, x);
                add_products(acc + 2 * r + 1, second, x);
                hold_whole(acc + 2 * r, 2);
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            const __m256 scale = _mm256_loadu_ps(factors + v * 8);
            const __m256 minimum = _mm256_loadu_ps(factors + PANEL + v * 8);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++)
                fold(out + r * 64 + v * 8, acc[2 * r + v], own + r * lda, scale, minimum);
        }
    }
}

INLINE void few_of(const int packing, const uint32_t *a, const uint32_t *b, int rows, int depth,
                   float *out, int width) {
    const size_t panel = codes_words(packing, depth);
    if (rows == 1 && width == 64)
        few_rows(packing, 1, 4, a, b, depth, out);
    else if (rows == 1)
        few_rows(packing, 1, 2, a, b, depth, out);
    else if (rows == 2)
        for (int column = 0; column < width; column += 32)
            few_rows(packing, 2, 2, a, b + column / PANEL * panel, depth, out + column);
    else
        for (int column = 0; column < width; column += PANEL)
            if (rows == 3)
                few_rows(packing, 3, 1, a, b + column / PANEL * panel, depth, out + column);
            else
                few_rows(packing, 4, 1, a, b + column / PANEL * panel, depth, out + column);
}

void codes_few(int packing, const uint32_t *a, size_t lda, const float *sums, const uint32_t *b,
               int rows, int depth, float *out, int width) {
    (void)lda, (void)sums;
    if (packing == INT4)
        few_of(INT4, a, b, rows, depth, out, width);
    else if (packing == INT8)
        few_of(INT8, a, b, rows, depth, out, width);
    else
        few_of(INT8_16, a, b, rows, depth, out, width);
}

#define CASE(ROWS)                                           \
    case ROWS:                                               \
        many_rows(packing, ROWS, a, codes, depth, out);      \
        break;

INLINE void many_of(const int packing, const uint32_t *a, size_t lda, const uint32_t *codes,
                    int rows, int depth, float *out) {
    for (int left = rows; left > 0; left -= 6, a += 6 * lda, out += 6 * 64)
        switch (left < 6 ? left : 6) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}

void codes_many(int packing, const uint32_t *a, size_t lda, const float *sums,
                const uint32_t *codes, int rows, int depth, float *out) {
    (void)sums;
    for (int v = 0; v < 2; v++, codes += codes_unpacked_words(packing, depth), out += PANEL)
        if (packing == INT8_16)
            many_of(INT8_16, a, lda, codes, rows, depth, out);
        else /* unpacked, the others are the same */
            many_of(INT8, a, lda, codes, rows, depth, out);
}

void codes_sums(int packing, const uint32_t *a, size_t lda, int rows, int depth, float *sums) {
    (void)packing, (void)a, (void)lda, (void)rows, (void)depth, (void)sums;
}
#else
void codes_rows(int packing, const float *x, uint32_t *out, int rows, int depth) {
    (void)packing, (void)x, (void)out, (void)rows, (void)depth;
}
#endif
