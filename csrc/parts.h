// Where the time goes inside the calls that run several kernels: seconds by kind of work, while recording is
// on. Recorded by the thread that makes the calls. Must not know: Python, what the kinds are summed up for.
#pragma once

namespace apcbatch {

// waiting: for the other threads, in all of the others.
enum class Part : int {
    products,
    convolution,
    scan,
    norms,
    gated_product,
    routing,
    attention,
    embedding,
    waiting
};
constexpr int kParts = 9;

void record_parts(bool on);    // on: from zero
const double* part_seconds();  // (kParts), since recording was last turned on

// Adds its lifetime to a part; without recording it costs one test.
class PartTimer {
  public:
    explicit PartTimer(Part part);
    ~PartTimer();
    PartTimer(const PartTimer&) = delete;
    PartTimer& operator=(const PartTimer&) = delete;

  private:
    Part part_;
    double begin_;  // below zero: not recording
};

}  // namespace apcbatch
