// Profile the calls that run several kernels: seconds by kind of work, per calling thread, while recording is
// on.
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

void record_parts(bool on);  // turning it on resets all parts to zero
bool recording_parts();
void add_part(Part part, double seconds);  // call only while recording is on
double clock_s();
const double* part_seconds();  // (kParts), since recording was last turned on

// Timer that adds the seconds of its lifetime to a part. If recording is off, it costs one branch.
class PartTimer {
  public:
    explicit PartTimer(Part part);
    ~PartTimer();
    PartTimer(const PartTimer&) = delete;
    PartTimer& operator=(const PartTimer&) = delete;

  private:
    Part part_;
    double begin_;  // negative: recording is off
};

}  // namespace apcbatch
