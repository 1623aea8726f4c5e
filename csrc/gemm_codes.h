// Panels of codes (see PanelRun): decoded into a thread's scratch, as the panels of this instruction set, or
// in registers for one row. Both give the bits of a product with the decoded weights.
#pragma once

#include "gemm_tile.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

// One group of a panel, which some inputs share, and how its codes become weights: value * scale, rounded to
// bfloat16, to nearest, ties to even, as a float.
//
// Rounds by adding a number 2^16 times as large to value * scale, and subtracting it: the sum, a float, keeps
// the bits down to the last one of bfloat16. The number is even there, so ties agree. It is 2^16 value *
// scale where that is exact: with scales of 8 significant bits the sum is one product, with (2^16 + 1) scale;
// with 11 bits it is a fused multiply-add. For other scales the product is rounded to a float first, and the
// number is 1.5 * 2^16 times its power of two. All three lose the sign of a zero, which fp8 has.
template <Codes codes_, bool has_zeros, Scales kind>
struct Group {
    static constexpr Codes codes = codes_;
    static constexpr int64_t kInputs = codes == Codes::int4 ? 2 : 1;  // inputs in kPanel bytes
    // A value is the code times kUnit, as it lies in the upper bits of an integer.
    static constexpr float kUnit = codes == Codes::fp8 ? 1.0f : codes == Codes::int4 ? 0x1p28f : 0x1p24f;
    Vec scales[kVecs], larger[kVecs], zeros[kVecs];  // larger: 2^16 times the scale

    // Loads group g of the panel at `panel`, which has `groups`.
    APC_INLINE void load(const char* panel, int64_t g, int64_t groups) {
        for (int v = 0; v < kVecs; ++v) {
            const int64_t at = g * kPanel + v * kLanes;
            Vec scale;
            if constexpr (kind == Scales::bfloat16) {
                scale = Vec::load(reinterpret_cast<const BFloat16*>(panel) + at);
            } else {
                scale = Vec::load(reinterpret_cast<const float*>(panel) + at);
            }
            larger[v] = scale * Vec::broadcast(65536.0f / kUnit);
            scales[v] = scale * Vec::broadcast((kind == Scales::bfloat16 ? 65537.0f : 1.0f) / kUnit);
            if constexpr (has_zeros) {
                const char* all = panel + kPanel * (groups * scale_bytes(kind) + g);
                zeros[v] = convert(VecI::load_upper(all, v)) * Vec::broadcast(kUnit / 0x1p24f);
            }
        }
    }

    // Returns the weights of vector v for input `input` of those in the bytes at p.
    template <int input>
    APC_INLINE Vec weights(const char* p, int v) const {
        VecI code = VecI::load_upper(p, v);
        Vec value;
        if constexpr (codes == Codes::fp8) {  // sign, exponent and mantissa to their places in a float
            value = as_float(shift_right<4>(code) & VecI::broadcast(int32_t(0x87f00000u)));
        } else {
            if constexpr (codes == Codes::int4)
                code = input == 0 ? shift_left<4>(code) : code & VecI::broadcast(int32_t(0xf0000000u));
            value = convert(code);
        }
        if constexpr (has_zeros) value = value - zeros[v];
        Vec weight = value * scales[v];
        if constexpr (kind == Scales::float32) {
            const VecI power = as_bits(weight) & VecI::broadcast(0x7f800000);
            const Vec added = as_float(power + VecI::broadcast((16 << 23) + (1 << 22)));
            weight = (weight + added) - added;
        } else {
            if constexpr (kind == Scales::float16) weight = fma(value, larger[v], weight);
            weight = fnma(value, larger[v], weight);
        }
        if constexpr (codes != Codes::fp8) return weight;
        return as_float(as_bits(weight) | (as_bits(value) & VecI::broadcast(int32_t(0x80000000u))));
    }
};

// Stores a vector of weights of an even and an odd input as pairs of bfloat16.
APC_INLINE void store_pairs(Vec even, Vec odd, char* to) {
    const VecI low = shift_right<16>(as_bits(even)) & VecI::broadcast(0xffff);
    as_float(low | as_bits(odd)).store(reinterpret_cast<float*>(to));
}

// Calls body(Group) for the codes of a run.
template <Codes codes, bool has_zeros, class Body>
APC_INLINE void with_scales(const PanelRun& run, const Body& body) {
    if (run.scales == Scales::bfloat16) return body(Group<codes, has_zeros, Scales::bfloat16>());
    if (run.scales == Scales::float16) return body(Group<codes, has_zeros, Scales::float16>());
    body(Group<codes, has_zeros, Scales::float32>());
}

template <class Body>
APC_INLINE void with_codes(const PanelRun& run, const Body& body) {
    if (run.codes == Codes::fp8) return with_scales<Codes::fp8, false>(run, body);
    if (run.codes == Codes::int8)
        return run.zeros ? with_scales<Codes::int8, true>(run, body)
                         : with_scales<Codes::int8, false>(run, body);
    return run.zeros ? with_scales<Codes::int4, true>(run, body) : with_scales<Codes::int4, false>(run, body);
}

// Calls body(group, codes of its first input, first input, inputs) for each group of a panel with k inputs.
template <class G, class Body>
APC_INLINE void each_group(const PanelRun& run, const char* panel, int64_t k, const Body& body) {
    const int64_t groups = (k + run.group - 1) / run.group;
    const char* codes = panel + code_bytes(run, k) - kPanel * ((k + G::kInputs - 1) / G::kInputs);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = g * run.group, left = k - first;
        G group;
        group.load(panel, g, groups);
        body(group, codes + first / G::kInputs * kPanel, first, left < run.group ? left : run.group);
    }
}

// Decodes a panel with k inputs to the layout of mode.
template <Mode mode, class G>
__attribute__((noinline)) void decode_panel(const PanelRun& run, const char* panel, int64_t k, char* to) {
    constexpr int64_t step = kPanel * 4;  // bytes of an input in float32, or of a pair in bfloat16
    each_group<G>(run, panel, k, [&](const G& group, const char* codes, int64_t first, int64_t inputs) {
        if constexpr (mode == Mode::kFloat) {
            float* at = reinterpret_cast<float*>(to + first * step);
            const auto store = [&](auto input) {
                for (int v = 0; v < kVecs; ++v)
                    group.template weights<decltype(input)::value>(codes, v).store(at + v * kLanes);
                at += kPanel;
            };
            for (int64_t i = 0; i + G::kInputs <= inputs; i += G::kInputs, codes += kPanel) {
                store(Number<0>());
                if constexpr (G::kInputs == 2) store(Number<1>());
            }
            if (inputs % G::kInputs) store(Number<0>());
        } else {
            constexpr int64_t odd =
                G::kInputs == 1 ? kPanel : 0;  // from an even input's codes to an odd one's
            char* at = to + first / 2 * step;
            for (int64_t i = 0; i < inputs; i += 2, codes += kPanel + odd, at += step) {
                for (int v = 0; v < kVecs; ++v) {
                    const Vec low = group.template weights<0>(codes, v);
                    const Vec high = i + 1 < inputs ? group.template weights<1>(codes + odd, v) : Vec::zero();
                    store_pairs(low, high, at + v * kLanes * 4);
                }
            }
        }
    });
    if constexpr (mode != Mode::kFloat) {
        const int64_t pairs = (k + 1) / 2;
        memset(to + pairs * step, 0, size_t((packed_k(k, 2) / 2 - pairs) * step));
    }
}

// Decodes panels, from one to the next panel_bytes apart in `to`.
template <Mode mode>
void decode_panels(const PanelRun& run, const char* panel, int64_t panels, int64_t k, char* to,
                   int64_t panel_bytes) {
    with_codes(run, [&](auto group) {
        for (int64_t p = 0; p < panels; ++p)
            decode_panel<mode, decltype(group)>(run, panel + p * code_bytes(run, k), k, to + p * panel_bytes);
    });
}

// Multiplies rows with panels of codes, as `tile` does with decoded ones.
template <int Rows, int Panels, class G>
__attribute__((noinline)) void code_tile(const PanelRun& run, const Tile& t) {
    Vec acc[Rows][Panels * kVecs];
    load_sums(acc, t.from, t.sums_panel);
    const int64_t groups = (t.k + run.group - 1) / run.group;
    const int64_t begin = t.panel_bytes - kPanel * ((t.k + G::kInputs - 1) / G::kInputs);
    for (int64_t g = 0; g < groups; ++g) {
        G group[Panels];
        for (int p = 0; p < Panels; ++p) group[p].load(t.b + p * t.panel_bytes, g, groups);
        const int64_t first = g * run.group, inputs = t.k - first < run.group ? t.k - first : run.group;
        const char* a = t.a + 4 * first;
        const char* codes = t.b + begin + first / G::kInputs * kPanel;
        const int64_t panel_bytes = t.panel_bytes;
        const auto of = [&](auto input) {
            return [&](int v) {
                return group[v / kVecs].template weights<decltype(input)::value>(
                    codes + v / kVecs * panel_bytes, v % kVecs);
            };
        };
        for (const char* end = codes + inputs / G::kInputs * kPanel; codes != end; codes += kPanel) {
            for (int p = 0; p < Panels; ++p)
                __builtin_prefetch(codes + (p + Panels) * panel_bytes);  // of the next tile
            multiply(acc, a, of(Number<0>()));
            if constexpr (G::kInputs == 2) multiply(acc, a + 4, of(Number<1>()));
            a += 4 * G::kInputs;
        }
        if (inputs % G::kInputs) multiply(acc, a, of(Number<0>()));
    }
    finish_tile(acc, t);
}

// Maximum rows whose products take less time than storing decoded panels.
constexpr int kCodeRows = 4;

inline void run_code_tile(const PanelRun& run, int64_t rows, int64_t panels, const Tile& t) {
    with_codes(run, [&](auto group) {
        using G = decltype(group);
        if (panels == 2) return code_tile<1, 2, G>(run, t);  // panels of more rows come one by one
        with_number<kCodeRows>(rows, [&](auto count) { code_tile<decltype(count)::value, 1, G>(run, t); });
    });
}

}  // namespace
}  // namespace APC_ISA
}  // namespace apcbatch
