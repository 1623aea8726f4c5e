// Convert Python arguments to the kernels' structs, for the bindings (pybind11) of both devices. The Python
// side checks shapes and keeps the memory alive.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "head_rows.h"
#include "head_scan.h"
#include "params.h"
#include "rowwise.h"

namespace py = pybind11;

using Address = std::uintptr_t;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

namespace apcbatch {

// Returns the DType of a code. Throws std::invalid_argument (ValueError in Python) if there is none.
inline DType dtype_of(int code) {
    if (code == 0 || code == 1) return DType(code);
    throw std::invalid_argument("the kernels take float32 (0) and bfloat16 (1); the type is " +
                                std::to_string(code));
}

// Tensor: address, stride of its first dimension in elements, and type. In Python, a tuple (address, stride,
// dtype code), or None for no tensor.
struct View {
    Address address = 0;
    std::int64_t stride = 0;
    DType dtype = DType::float32;
};

constexpr std::int64_t kMaybe = 0;  // count of an optional tensor: its address may be null

// Returns the address of `count` values of `bytes` bytes each. Throws std::invalid_argument (ValueError in
// Python) if it is not aligned, if it is null with a count above 0, or if the count is negative. The Python
// side checks that the memory is large enough.
inline void* checked(Address address, std::int64_t count, std::int64_t bytes) {
    if (count < 0) throw std::invalid_argument("sizes must be 0 or more; one is " + std::to_string(count));
    if (count > 0 && address == 0) {
        throw std::invalid_argument("a tensor of " + std::to_string(count) +
                                    " rows or values has no memory: was its storage resized?");
    }
    if (address % Address(bytes) != 0) {
        throw std::invalid_argument("values of " + std::to_string(bytes) +
                                    " bytes must lie at a multiple of that; they are at " +
                                    std::to_string(address) + ": clone() the tensor");
    }
    return reinterpret_cast<void*>(address);
}

inline void* values(const View& view, std::int64_t count) {
    return checked(view.address, count, bytes_of(view.dtype));
}
inline float* floats(Address address, std::int64_t count) {
    return static_cast<float*>(checked(address, count, sizeof(float)));
}
inline std::int64_t* integers(Address address, std::int64_t count) {
    return static_cast<std::int64_t*>(checked(address, count, sizeof(std::int64_t)));
}

// The same for a view, whose type must be `dtype`.
inline void* values(const View& view, DType dtype, std::int64_t count) {
    if (view.address != 0 && view.dtype != dtype) {
        throw std::invalid_argument("a tensor must be of type " + std::to_string(int(dtype)) +
                                    ", as the kernel's others; it is of type " +
                                    std::to_string(int(view.dtype)));
    }
    return checked(view.address, count, bytes_of(dtype));
}

// x (t, d); weight (d, w); bias (d) or none; state (slots, w - 1, d); out (t, d).
inline ConvParams conv_params(const RaggedParams& ragged, const View& x, Address weight, Address bias,
                              const View& state, const View& out, std::int64_t d_inner, std::int64_t width,
                              bool has_silu = true) {
    const std::int64_t b = ragged.num_sequences;
    ConvParams params;
    params.ragged = ragged;
    params.dtype = x.dtype;
    params.d_inner = d_inner;
    params.width = width;
    params.x = values(x, b);
    params.x_stride = x.stride;
    params.weight = floats(weight, d_inner);
    params.bias = floats(bias, kMaybe);
    params.state = values(state, x.dtype, kMaybe);
    params.state_stride = state.stride;
    params.out = values(out, x.dtype, b);
    params.out_stride = out.stride;
    params.has_silu = has_silu;
    return params;
}

// x, dt, z or none, out (t, d); B, C (t, n); A (n, d); D, dt_bias (d) or none; state (slots, n, d).
inline ScanParams scan_params(const RaggedParams& ragged, const View& x, const View& dt, Address A,
                              const View& B, const View& C, Address D, const View& z, Address dt_bias,
                              const View& state, const View& out, std::int64_t d_inner,
                              std::int64_t d_state) {
    const std::int64_t b = ragged.num_sequences;
    ScanParams params;
    params.ragged = ragged;
    params.dtype = x.dtype;
    params.d_inner = d_inner;
    params.d_state = d_state;
    params.x = values(x, b);
    params.x_stride = x.stride;
    params.dt = values(dt, x.dtype, b);
    params.dt_stride = dt.stride;
    params.A = floats(A, d_inner);
    params.B = values(B, x.dtype, b);
    params.B_stride = B.stride;
    params.C = values(C, x.dtype, b);
    params.C_stride = C.stride;
    params.D = floats(D, kMaybe);
    params.z = values(z, x.dtype, kMaybe);
    params.z_stride = z.stride;
    params.dt_bias = floats(dt_bias, kMaybe);
    params.state = static_cast<float*>(values(state, DType::float32, kMaybe));
    params.state_stride = state.stride;
    params.out = values(out, x.dtype, b);
    params.out_stride = out.stride;
    return params;
}

// Arguments of head_scan that are the same in every call. dtype: code of the activations'. A, dt_bias:
// (value_heads). D: (value_heads), for the rule ssd, which also has the limits of dt; null for delta. state:
// (slots, value_heads, value_dim / lanes, key_dim, lanes).
inline HeadScanParams head_scan_params(int dtype, std::int64_t key_heads, std::int64_t value_heads,
                                       std::int64_t key_dim, std::int64_t value_dim, std::int64_t lanes,
                                       Address A, Address dt_bias, Address D, float dt_min, float dt_max,
                                       const View& state) {
    HeadScanParams p;
    p.rule = D == 0 ? HeadRule::delta : HeadRule::ssd;
    p.dtype = dtype_of(dtype);
    p.key_heads = key_heads;
    p.value_heads = value_heads;
    p.key_dim = key_dim;
    p.value_dim = value_dim;
    p.lanes = lanes;
    p.A = floats(A, value_heads);
    p.dt_bias = floats(dt_bias, value_heads);
    p.D = floats(D, kMaybe);
    p.dt_min = dt_min;
    p.dt_max = dt_max;
    p.state = static_cast<float*>(values(state, DType::float32, kMaybe));
    p.state_stride = state.stride;
    return p;
}

// x: (t, h). delta: (t, h) or none. weight: (h) or none. y: (t, h) contiguous.
inline NormParams norm_params(std::int64_t t, std::int64_t h, const View& x, const View& delta,
                              Address weight, float eps, const View& y) {
    NormParams p;
    p.t = t;
    p.h = h;
    p.x = values(x, t * h);
    p.x_stride = x.stride;
    p.x_dtype = x.dtype;
    p.delta = values(delta, kMaybe);
    p.delta_stride = delta.stride;
    p.delta_dtype = delta.dtype;
    p.weight = floats(weight, kMaybe);
    p.eps = eps;
    p.y = values(y, t * h);
    p.y_dtype = y.dtype;
    return p;
}

// x: (t, heads, d) float32, heads next to each other. gate: (t, heads, d). weight: (d) or (heads, d),
// weight_stride 0 or d, or none. y: (t, heads, d) contiguous, of gate's type.
inline GatedNormParams gated_norm_params(std::int64_t t, std::int64_t heads, std::int64_t d, const View& x,
                                         const View& gate, Address weight, std::int64_t weight_stride,
                                         float eps, bool gate_first, const View& y) {
    GatedNormParams p;
    p.t = t;
    p.heads = heads;
    p.d = d;
    p.x = static_cast<float*>(values(x, DType::float32, t));
    p.x_stride = x.stride;
    p.x_head_stride = d;
    p.gate = values(gate, t);
    p.gate_stride = gate.stride;
    p.gate_first = gate_first;
    p.weight = floats(weight, kMaybe);
    p.weight_stride = weight_stride;
    p.eps = eps;
    p.y = values(y, gate.dtype, t);
    p.dtype = gate.dtype;
    return p;
}

// bias (n) or none, groups, top_groups, is_normalised, eps, scale: see RoutingParams.
using RoutingRule = std::tuple<Address, std::int64_t, std::int64_t, bool, float, float>;

// logits: (t, n) float32. weights, indices: (t, k) contiguous.
inline RoutingParams routing_params(std::int64_t t, std::int64_t n, std::int64_t k, const View& logits,
                                    const RoutingRule& rule, Address weights, Address indices) {
    RoutingParams p;
    Address bias;
    std::tie(bias, p.groups, p.top_groups, p.is_normalised, p.eps, p.scale) = rule;
    p.t = t;
    p.n = n;
    p.k = k;
    p.logits = static_cast<float*>(values(logits, DType::float32, t));
    p.stride = logits.stride;
    p.weights = floats(weights, t);
    p.indices = integers(indices, t);
    p.bias = floats(bias, kMaybe);
    return p;
}

// x, y: (t, heads, head_dim), of one type. weight: (head_dim). steps: (pairs). positions: (t).
inline NormRopeParams norm_rope_params(std::int64_t t, std::int64_t heads, std::int64_t head_dim,
                                       const View& x, Address weight, float eps, Address steps,
                                       std::int64_t pairs, Address positions, const View& y) {
    NormRopeParams p;
    p.t = t;
    p.heads = heads;
    p.head_dim = head_dim;
    p.x = values(x, t * heads * head_dim);
    p.x_stride = x.stride;
    p.weight = floats(weight, kMaybe);
    p.eps = eps;
    p.steps = integers(steps, pairs);
    p.pairs = pairs;
    p.positions = integers(positions, t);
    p.y = values(y, x.dtype, t * heads * head_dim);
    p.y_stride = y.stride;
    p.dtype = x.dtype;
    return p;
}

// x, gate, y: (t, h), of one type.
inline SigmoidMulParams sigmoid_mul_params(std::int64_t t, std::int64_t h, const View& x, const View& gate,
                                           const View& y) {
    SigmoidMulParams p;
    p.t = t;
    p.h = h;
    p.x = values(x, t * h);
    p.x_stride = x.stride;
    p.gate = values(gate, x.dtype, t * h);
    p.gate_stride = gate.stride;
    p.y = values(y, x.dtype, t * h);
    p.y_stride = y.stride;
    p.dtype = x.dtype;
    return p;
}

}  // namespace apcbatch

namespace pybind11 {
namespace detail {

template <>
struct type_caster<apcbatch::View> {
    PYBIND11_TYPE_CASTER(apcbatch::View, const_name("tuple[int, int, int] | None"));

    bool load(handle source, bool) {
        value = {};
        if (source.is_none()) return true;
        if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 3) return false;
        const auto part = [&](int i) { return PyTuple_GET_ITEM(source.ptr(), i); };
        value.address = PyLong_AsSize_t(part(0));
        value.stride = PyLong_AsLongLong(part(1));
        const long code = PyLong_AsLong(part(2));
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return false;
        }
        value.dtype = apcbatch::dtype_of(int(code));
        return true;
    }
};

}  // namespace detail
}  // namespace pybind11
