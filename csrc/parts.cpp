#include "parts.h"

#include <chrono>

namespace apcbatch {
namespace {

struct Record {
    bool on = false;
    double seconds[kParts] = {};
};

Record& record() {
    thread_local Record value;
    return value;
}

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void record_parts(bool on) {
    if (on) record() = Record{};
    record().on = on;
}

const double* part_seconds() { return record().seconds; }

PartTimer::PartTimer(Part part) : part_(part), begin_(record().on ? now() : -1.0) {}

PartTimer::~PartTimer() {
    if (begin_ >= 0.0) record().seconds[int(part_)] += now() - begin_;
}

}  // namespace apcbatch
