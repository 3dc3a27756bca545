#include "cuda_on_cpu.h"

extern "C" {
void emulator_switch(void **save, void *resume);  // keeps the caller's registers on its stack
extern char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));
__attribute__((visibility("default"))) void emulator_set_order(int order) { emulator::order = order; }
}
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulator {

dim3 thread, block, grid, threads;
int order = 0;

namespace {

constexpr size_t STACK = 1 << 16;
enum State { READY, AT_BARRIER, IN_WARP, DONE };

struct Fiber {
  void *stack_pointer;
  State state;
};
struct Warp {
  unsigned mask, arrived;
  WarpOp op;
  uint64_t bits[32], result[32];
  int source[32];
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<char> stacks;
void *scheduler;
const std::function<void()> *body;
std::string error;

Fiber &self() { return fibers[thread.x]; }
void leave() { emulator_switch(&self().stack_pointer, scheduler); }

void fail(const std::string &what) {
  if (error.empty()) error = "thread " + std::to_string(thread.x) + " of block " + std::to_string(block.x) + ": " + what;
  self().state = DONE;
  leave();
}

void run_fiber() {
  (*body)();
  self().state = DONE;
  leave();
}

std::vector<int64_t> permuted(int64_t count, std::mt19937 &random) {
  std::vector<int64_t> out(count);
  std::iota(out.begin(), out.end(), 0);
  if (order == 1) std::reverse(out.begin(), out.end());
  if (order > 1) std::shuffle(out.begin(), out.end(), random);
  return out;
}

void start(unsigned i) {
  char *top = stacks.data() + (i + 1) * STACK;
  top -= reinterpret_cast<uintptr_t>(top) % 16;
  void **frame = reinterpret_cast<void **>(top) - 8;  // six registers, where to return to, and a gap: aligned by 16
  std::fill(frame, frame + 8, nullptr);
  frame[6] = reinterpret_cast<void *>(&run_fiber);
  fibers[i] = {frame, READY};
}

void run_until_blocked(unsigned i) {
  thread = dim3(i);
  emulator_switch(&scheduler, fibers[i].stack_pointer);
}

void run_block(unsigned count, std::mt19937 &random) {
  std::memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
  fibers.resize(count);
  warps.assign((count + 31) / 32, Warp{});
  for (unsigned i = 0; i < count; ++i) start(i);
  for (unsigned done = 0; done < count;) {
    for (const int64_t warp : permuted(int64_t(warps.size()), random)) {
      const auto lanes = permuted(std::min<int64_t>(32, count - warp * 32), random);
      for (bool moved = true; moved && error.empty();) {
        moved = false;
        for (const int64_t lane : lanes)
          if (fibers[warp * 32 + lane].state == READY) run_until_blocked(unsigned(warp * 32 + lane)), moved = true;
      }
      if (!error.empty()) return;
    }
    unsigned waiting = 0;
    done = 0;
    for (unsigned i = 0; i < count; ++i) waiting += fibers[i].state == AT_BARRIER, done += fibers[i].state == DONE;
    if (waiting + done < count || (waiting && done)) {
      error = "block " + std::to_string(block.x) + ": " + std::to_string(waiting) + " threads wait at a barrier, " +
              std::to_string(done) + " have returned, the others wait for a lane that does not come";
      return;
    }
    if (waiting)
      for (Fiber &fiber : fibers) fiber.state = READY;
  }
}

}  // namespace

void launch(dim3 blocks, dim3 count, const std::function<void()> &kernel) {
  stacks.resize((count.x + 1) * STACK);
  body = &kernel, grid = blocks, threads = count, error.clear();
  std::mt19937 random{unsigned(order)};
  for (const int64_t at : permuted(int64_t(blocks.x) * blocks.y, random)) {
    block = dim3(unsigned(at % blocks.x), unsigned(at / blocks.x));
    run_block(count.x, random);
    if (!error.empty()) throw std::runtime_error(error);
  }
}

void barrier() {
  self().state = AT_BARRIER;
  leave();
}

uint64_t meet(WarpOp op, unsigned mask, uint64_t bits, int source) {
  Warp &w = warps[thread.x / 32];
  const int lane = int(thread.x % 32);
  if (!(mask >> lane & 1)) fail("the mask of a warp operation leaves its caller out");
  if (w.arrived && (w.mask != mask || w.op != op)) fail("lanes of a warp meet in different operations");
  w.mask = mask, w.op = op, w.arrived |= 1u << lane;
  w.bits[lane] = bits, w.source[lane] = source;
  if (w.arrived != mask) {
    self().state = IN_WARP;
    leave();
    return w.result[lane];
  }
  unsigned ballot = 0;
  for (int i = 0; i < 32; ++i) ballot |= unsigned(mask >> i & 1 && w.bits[i]) << i;
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    const bool known = mask >> w.source[i] & 1;  // a lane that is not there gives garbage
    w.result[i] = op == BALLOT ? ballot : known ? w.bits[w.source[i]] : ~uint64_t(0);
    fibers[thread.x / 32 * 32 + i].state = READY;
  }
  w.arrived = 0;
  return w.result[lane];
}

}  // namespace emulator
