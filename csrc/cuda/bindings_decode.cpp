// apcbatch._CUDA: decode passes of a stack for Python (pybind11). The Python side checks shapes, and keeps
// alive what the addresses point at.
#include "addresses.h"
#include "decode.h"

namespace apcbatch {
namespace cuda {
namespace {

// What stays the same from pass to pass.
struct Stack {
    DecodeParams params = {};

    // layers: a table (num_layers, 17) of addresses on the device, in the order of DecodeLayer.
    Stack(int dtype, int hidden, int d_inner, int d_state, int dt_rank, int width, int vocab, int num_layers,
          Address layers, bool inner_norms, float norm_eps, float inner_eps, Address final_norm, Address head,
          std::int64_t ssm_stride, std::int64_t conv_stride) {
        params.shape = {DType(dtype), hidden, d_inner, d_state, dt_rank, width, vocab};
        params.num_layers = num_layers;
        params.layers = static_cast<const DecodeLayer*>(pointer(layers));
        params.inner_norms = inner_norms;
        params.norm_eps = norm_eps;
        params.inner_eps = inner_eps;
        params.final_norm = floats(final_norm);
        params.head = pointer(head);
        params.ssm_stride = ssm_stride;
        params.conv_stride = conv_stride;
    }

    int most_rows() const { return most_decode_rows(params.shape); }

    void run(const Batch& batch, Address residual, Address x, Address z, Address y, Address low,
             Address logits, Address arrivals, Address stream) const {
        DecodeParams pass = params;
        pass.ragged = batch.ragged;
        pass.rows = int(batch.ragged.num_sequences);
        pass.residual = static_cast<float*>(pointer(residual));
        pass.x = pointer(x);
        pass.z = pointer(z);
        pass.y = pointer(y);
        pass.low = pointer(low);
        pass.logits = static_cast<float*>(pointer(logits));
        pass.arrivals = static_cast<unsigned*>(pointer(arrivals));
        decode(pass, stream_of(stream));
    }
};

static_assert(sizeof(DecodeLayer) == 17 * sizeof(void*), "the table of layers has 17 columns");

}  // namespace

void bind_decode(py::module_& m) {
    py::class_<Stack>(m, "DecodeStack")
        .def(py::init<int, int, int, int, int, int, int, int, Address, bool, float, float, Address, Address,
                      std::int64_t, std::int64_t>())
        .def("most_rows", &Stack::most_rows)
        .def("run", &Stack::run, ReleaseGil());
}

}  // namespace cuda
}  // namespace apcbatch
