// A model's whole pass in one call for Python (pybind11). What stays the same from pass to pass is given
// once.
#include "bindings.h"
#include "stack.h"

namespace apcbatch {
namespace {

AttentionMixerParams attention_mixer_params(const PreNorm& norm, const Projection& qkv_proj,
                                            const Projection& o_proj, std::int64_t heads,
                                            std::int64_t kv_heads, std::int64_t head_dim, float scale,
                                            const View& k_cache, const View& v_cache) {
    AttentionMixerParams p;
    p.norm = norm;
    p.dtype = qkv_proj.dtype;
    p.qkv_proj = qkv_proj;
    p.o_proj = o_proj;
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.head_dim = head_dim;
    p.scale = scale;
    p.k_cache = values(k_cache, kMaybe);
    p.v_cache = values(v_cache, k_cache.dtype, kMaybe);
    p.cache_dtype = k_cache.dtype;
    return p;
}

// mixer: Mixer or AttentionMixer; norm and feed_forward: that of an Mlp or a Mixture, or both None.
Layer layer(const py::handle& mixer, const py::handle& norm, const py::handle& feed_forward) {
    Layer one;
    if (py::isinstance<MixerParams>(mixer)) {
        one.mixer = mixer.cast<MixerParams>();
    } else {
        one.mixer = mixer.cast<AttentionMixerParams>();
    }
    if (feed_forward.is_none()) return one;
    one.norm = norm.cast<PreNorm>();
    if (py::isinstance<MlpParams>(feed_forward)) {
        one.feed_forward = feed_forward.cast<MlpParams>();
    } else {
        one.feed_forward = feed_forward.cast<MixtureParams>();
    }
    return one;
}

StackParams stack_params(const py::list& layers, const PreNorm& norm, const Projection& head,
                         Address embedding) {
    StackParams p;
    for (const py::handle one : layers) {
        const py::tuple parts = py::reinterpret_borrow<py::tuple>(one);
        p.layers.push_back(layer(parts[0], parts[1], parts[2]));
    }
    p.norm = norm;
    p.head = head;
    p.embedding = values({embedding, 0, head.dtype}, kMaybe);
    return p;
}

// Of rows of the residual: how many, their numbers, where what is wanted of them goes.
using Wanted = std::tuple<std::int64_t, Address, Address>;

WantedRows wanted_rows(const Wanted& wanted) {
    const std::int64_t count = std::get<0>(wanted);
    return {count, integers(std::get<1>(wanted), count)};
}

// sequences: as for paged_attention, and where each token's keys and values go. on_layer: None or to be
// called.
void bound_run_stack(const StackParams& stack, Address tokens, const RaggedParams& ragged,
                     const std::tuple<Address, std::int64_t, Address, Address>& pages, const Wanted& logits,
                     const Wanted& hidden, const py::object& on_layer, int num_threads) {
    PassParams pass;
    const std::int64_t b = ragged.num_sequences;
    pass.tokens = integers(tokens, b);
    pass.ragged = ragged;
    pass.sequences.num_sequences = b;
    pass.sequences.page_table = integers(std::get<0>(pages), kMaybe);
    pass.sequences.page_table_stride = std::get<1>(pages);
    pass.sequences.cu_seqlens = ragged.cu_seqlens;
    pass.sequences.context = integers(std::get<2>(pages), kMaybe);
    pass.sequences.token_slots = integers(std::get<3>(pages), kMaybe);
    pass.for_logits = wanted_rows(logits);
    pass.logits = floats(std::get<2>(logits), pass.for_logits.count);
    pass.for_hidden = wanted_rows(hidden);
    pass.hidden = values({std::get<2>(hidden), 0, stack.head.dtype}, pass.for_hidden.count);
    std::function<void()> tell;
    if (!on_layer.is_none()) {
        tell = [&on_layer] {
            const py::gil_scoped_acquire python;
            on_layer();
        };
    }
    const py::gil_scoped_release others;
    run_stack(stack, pass, tell, num_threads);
}

}  // namespace
}  // namespace apcbatch

void bind_stack(py::module_& m) {
    using namespace apcbatch;
    using namespace py::literals;
    py::class_<AttentionMixerParams>(m, "AttentionMixer")
        .def(py::init(&attention_mixer_params), py::kw_only(), "norm"_a, "qkv_proj"_a, "o_proj"_a, "heads"_a,
             "kv_heads"_a, "head_dim"_a, "scale"_a, "k_cache"_a, "v_cache"_a);
    py::class_<StackParams>(m, "Stack").def(py::init(&stack_params)).def("run", &bound_run_stack);
}
