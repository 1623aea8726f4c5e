// Weights that stay encoded: a weight is bfloat16((code - zero) * scale), rounded once to nearest, ties to
// even. The kernels need sm_90.
//
// The codes of a row lie in the order of a tensor-core instruction's operands. 8 bits: of 16 inputs, bytes 4
// q to 4 q + 3 are those of the inputs 2 q + 8, 2 q, 2 q + 9 and 2 q + 1. 4 bits: of 32 inputs, byte 4 q + 2
// b + s is, lower bits first, those of the inputs 16 s + 2 q + b and 8 more.
#pragma once

#include <memory>
#include <vector>

#include "products.h"

namespace apcbatch {
namespace cuda {

constexpr int kCodeInputs = 128;  // inputs of a slice of codes

// Bytes of these inputs in a row, and of a row in a slice.
__host__ __device__ constexpr int code_bytes(CodeKind kind, int inputs) {
    return kind == CodeKind::none ? 2 * inputs : kind == CodeKind::int4 ? inputs / 2 : inputs;
}
__host__ __device__ constexpr int code_row(CodeKind kind) { return kind == CodeKind::int4 ? 64 : 128; }

// Number of groups of inputs in a slice that have scales of their own. shift: see Coding.
__host__ __device__ inline int groups_of_slice(const Coding& coding) {
    return coding.shift < 7 ? kCodeInputs >> coding.shift : 1;
}

// Rows of a matrix that are encoded alike, or, with CodeKind::none, bfloat16.
struct CodedRows {
    int rows;
    const void* codes;  // (rows, in), aligned to 16 bytes
    Coding coding;
};

// Memory for one decoded matrix, which all matrices of a device share: launches read the address when they
// are made.
struct Scratch {
    void* memory = nullptr;
};

// Weights (out, in): the rows of the parts, one after the other.
struct CodedWeights {
    int in;
    std::vector<CodedRows> parts;
    std::shared_ptr<const Scratch> scratch;
};

// Writes the weights (out, in) in bfloat16 to the scratch memory. The next kernel of the stream may read them
// at once, as if no kernel had written them.
void decode(const CodedWeights& weights, cudaStream_t stream);

// Products with at most kMostCodedRows rows. Each of 32 rows reads the codes once. takes_coded_product:
// returns true if the pieces of the inputs have whole groups. The product's weight is ignored.
constexpr int kMostCodedRows = 64;
bool takes_coded_product(const CodedWeights& weights, int pieces);
void coded_product(const CodedWeights& weights, const ProductParams& params, cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
