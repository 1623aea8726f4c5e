// Products of 8-bit integers, to see what they would gain: y = (q W^T) * scales, with exact sums of integers.
//
// Rows of x are quantised one by one: q = round(x * 127 / most), most the largest |x| of the row, which gives
// x's scale; each output of the weights has a scale of its own. A sum of int32 is exact below 133,000 inputs,
// so its bits depend on no order, no cut and no instruction set. Two ways: VPDPBUSD (AVX512-VNNI), whose left
// side is unsigned, so that 128 is added to q and 128 times the sum of the weights is taken off again; and
// TDPBSSD (AMX-INT8). A benchmark's own code, built by int8_products.py; the package has none of it.
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t kPanel = 16;  // outputs side by side
constexpr int64_t kTileK = 64;  // inputs of an AMX tile, to which rows and panels are padded
constexpr int64_t kRows = 6, kPanels = 4;  // of the largest tile of vectors

int64_t padded(int64_t in) { return (in + kTileK - 1) / kTileK * kTileK; }
int64_t panels_of(int64_t out) { return (out + kPanel - 1) / kPanel; }

struct Weights {
    int64_t out, in;
    const int8_t* packed;   // panels; in a panel, four inputs by four, kPanel quadruples
    const int32_t* offset;  // (out padded) 128 times the sum of an output's weights
    const float* scales;    // (out padded)
};

// flip: what a byte of q is combined with: 0, or 0x80 where it is to be q + 128 without a sign.
void quantise(const float* x, int64_t in, uint8_t flip, int8_t* q, float* scale) {
    __m512 most = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 16 <= in; k += 16) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + k)));
    float top = _mm512_reduce_max_ps(most);
    for (; k < in; ++k) top = x[k] > top ? x[k] : -x[k] > top ? -x[k] : top;
    const float factor = top > 0 ? 127.0f / top : 0.0f;
    for (k = 0; k + 16 <= in; k += 16) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k), _mm512_set1_ps(factor)));
        const __m128i bytes = _mm_xor_si128(_mm512_cvtsepi32_epi8(whole), _mm_set1_epi8(int8_t(flip)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q + k), bytes);
    }
    for (; k < in; ++k) q[k] = int8_t(uint8_t(int8_t(__builtin_nearbyintf(x[k] * factor))) ^ flip);
    memset(q + in, 0, size_t(padded(in) - in));
    *scale = top / 127.0f;
}

void store(const Weights& w, int64_t panel, __m512i sum, float scale, float* y) {
    const __m512 scales = _mm512_mul_ps(_mm512_loadu_ps(w.scales + panel * kPanel), _mm512_set1_ps(scale));
    const int64_t left = w.out - panel * kPanel;
    const __mmask16 mask = left >= kPanel ? 0xffff : __mmask16((1u << left) - 1);
    _mm512_mask_storeu_ps(y + panel * kPanel, mask, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales));
}

template <int R, int P>
void vector_tile(const Weights& w, int64_t panel, const int8_t* q, const float* scales, float* y) {
    const int64_t in = padded(w.in);
    __m512i sums[R][P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
        const __m512i offset = _mm512_loadu_si512(w.offset + (panel + p) * kPanel);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][p] = _mm512_sub_epi32(_mm512_setzero_si512(), offset);
    }
    const int8_t* b = w.packed + panel * kPanel * in;
    const int64_t panel_bytes = kPanel * in;
    for (const int8_t* end = q + in; q != end; q += 4, b += 4 * kPanel) {
        __m512i weights[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
            weights[p] = _mm512_loadu_si512(b + p * panel_bytes);
            if (R == 1) _mm_prefetch(b + p * panel_bytes + 1024, _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            int32_t four;
            memcpy(&four, q + r * in, 4);
            const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p)  // not the intrinsic: GCC 12 copies the sums around it
                asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][p]) : "v"(x), "v"(weights[p]));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) store(w, panel + p, sums[r][p], scales[r], y + r * w.out);
}

template <int R>
void vector_rows(const Weights& w, int64_t panel, int64_t panels, const int8_t* q, const float* s, float* y) {
    if (panels == 4) return vector_tile<R, 4>(w, panel, q, s, y);
    if (panels == 3) return vector_tile<R, 3>(w, panel, q, s, y);
    if (panels == 2) return vector_tile<R, 2>(w, panel, q, s, y);
    vector_tile<R, 1>(w, panel, q, s, y);
}

void vectors(const Weights& w, int64_t panel, int64_t panels, int64_t rows, const int8_t* q, const float* s,
             float* y) {
    const int64_t in = padded(w.in);
    for (int64_t r = 0; r < rows; r += kRows, q += kRows * in, s += kRows, y += kRows * w.out) {
        switch (rows - r) {
            case 1: vector_rows<1>(w, panel, panels, q, s, y); break;
            case 2: vector_rows<2>(w, panel, panels, q, s, y); break;
            case 3: vector_rows<3>(w, panel, panels, q, s, y); break;
            case 4: vector_rows<4>(w, panel, panels, q, s, y); break;
            case 5: vector_rows<5>(w, panel, panels, q, s, y); break;
            default: vector_rows<6>(w, panel, panels, q, s, y);
        }
    }
}

struct alignas(64) Shape {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 32 rows and two panels at a time; there is room for whole tiles in q and s.
void matrices(const Weights& w, int64_t panel, int64_t panels, int64_t rows, const int8_t* q, const float* s,
              float* y) {
    const int64_t in = padded(w.in);
    static const Shape shape;
    _tile_loadconfig(&shape);
    alignas(64) int32_t sums[4][16][kPanel];
    for (int64_t r = 0; r < rows; r += 32) {
        const bool below = rows - r > 16;
        for (int64_t p = 0; p < panels; p += 2) {
            const bool beside = panels - p > 1;
            const int8_t* a = q + r * in;
            const int8_t* b = w.packed + (panel + p) * kPanel * in;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t k = 0; k < in; k += kTileK, a += kTileK, b += kTileK * kPanel) {
                _tile_loadd(4, a, in);
                _tile_loadd(6, b, 64);
                _tile_dpbssd(0, 4, 6);
                if (beside) {
                    _tile_loadd(7, b + kPanel * in, 64);
                    _tile_dpbssd(1, 4, 7);
                }
                if (below) {
                    _tile_loadd(5, a + 16 * in, in);
                    _tile_dpbssd(2, 5, 6);
                    if (beside) _tile_dpbssd(3, 5, 7);
                }
            }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            const int64_t count = rows - r < 32 ? rows - r : 32;
            for (int64_t i = 0; i < count; ++i)
                for (int64_t j = 0; j < (beside ? 2 : 1); ++j)
                    store(w, panel + p + j, _mm512_load_si512(sums[2 * (i / 16) + j][i % 16]), s[r + i],
                          y + (r + i) * w.out);
        }
    }
    _tile_release();
}

}  // namespace

extern "C" {

// 0: no VNNI, 1: VNNI, 2: AMX-INT8 besides, which Linux grants this process.
int int8_level() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512vnni")) return 0;
    if (!__builtin_cpu_supports("amx-int8")) return 1;
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0 ? 2 : 1;
}

int64_t int8_packed_bytes(int64_t out, int64_t in) { return panels_of(out) * kPanel * padded(in); }

// w (out, in). offset (out padded to kPanel).
void int8_pack(const int8_t* w, int64_t out, int64_t in, int8_t* packed, int32_t* offset) {
    memset(packed, 0, size_t(int8_packed_bytes(out, in)));
    memset(offset, 0, size_t(4 * panels_of(out) * kPanel));
    for (int64_t o = 0; o < out; ++o) {
        int8_t* panel = packed + o / kPanel * kPanel * padded(in);
        for (int64_t k = 0; k < in; ++k) {
            panel[k / 4 * 4 * kPanel + 4 * (o % kPanel) + k % 4] = w[o * in + k];
            offset[o] += 128 * w[o * in + k];
        }
    }
}

// x (rows, in) to y (rows, out). q (rows padded to 32, in padded), scales (rows padded): scratch.
void int8_linear(int use_matrices, const float* x, int64_t rows, int64_t out, int64_t in, const int8_t* packed,
                 const int32_t* offset, const float* w_scales, int8_t* q, float* scales, float* y, int threads) {
    const Weights w{out, in, packed, offset, w_scales};
    const auto run = use_matrices ? matrices : vectors;
    const int64_t block = 192, blocks = (rows + block - 1) / block;
    const int64_t groups = (panels_of(out) + kPanels - 1) / kPanels;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r) quantise(x + r * in, in, use_matrices ? 0 : 0x80, q + r * padded(in), scales + r);
#pragma omp for schedule(static) collapse(2)
        for (int64_t b = 0; b < blocks; ++b) {
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t left = panels_of(out) - g * kPanels, r = b * block;
                run(w, g * kPanels, left < kPanels ? left : kPanels, rows - r < block ? rows - r : block,
                    q + r * padded(in), scales + r, y + r * out);
            }
        }
    }
}
}
