// Time inside the calls that run several kernels: seconds by kind of work, while recording is on. Recorded by
// the calling thread.
#pragma once

namespace apcbatch {

// waiting: mean time a thread idles at a barrier (already contained in the other parts).
enum class Part : int {
    products,
    convolution,
    scan,
    norms,
    gated_product,
    routing,
    attention,
    embedding,
    sampling,
    waiting
};
constexpr int kParts = 10;

void record_parts(bool on);  // on: from zero
bool recording_parts();
void add_part(Part part, double seconds);  // while recording is on
double clock_s();
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
