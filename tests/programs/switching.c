/* MODE KIND SWITCHES: fibers, each with a stack of its own, that allocate and yield to each other in random order.
 *   around   each allocates from malloc and yields between two calls
 *   inside   each yields inside an allocator's function, fiber_take, between its entry and its return
 *   jumps    the same, but fiber_take ends in a jump through a pointer, so that its end cannot be read off its code
 *   wander   as inside, and another thread may go on with the fiber
 * KIND is how stacks are switched: context (swapcontext) or hand (assembly, as fast libraries do). x86-64. */
#include <ucontext.h>
#include "truth.h"
enum { FIBERS = 16, STACK = 256 << 10, SLOTS = 1 << 16 };
struct fiber { ucontext_t context; void *sp; int is_taken, is_done; uint64_t random; };
static struct fiber fibers[FIBERS];
static char (*stacks)[STACK];
static char (*store)[256];
static uint64_t next_slot, switches_left;
static int yields_inside, by_hand, done;
static __thread ucontext_t scheduler_context;
static __thread void *scheduler_sp;
static __thread struct fiber *running;
void switch_stack(void **save, void *load);
__asm__(
    ".text\n"
    ".type switch_stack, @function\n"
    "switch_stack:\n"
    "  pushq %rbx\n  pushq %rbp\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbp\n  popq %rbx\n"
    "  retq\n"
    ".size switch_stack, .-switch_stack\n");
/* What belongs to the thread is found anew after each switch. */
NOINLINE static struct fiber **own(void) { struct fiber **p = &running; KEEP(p); return p; }
NOINLINE static void **own_sp(void) { void **p = &scheduler_sp; KEEP(p); return p; }
NOINLINE static ucontext_t *own_context(void) { ucontext_t *p = &scheduler_context; KEEP(p); return p; }
NOINLINE static void yield(void) {
  struct fiber *fiber = *own();
  if (!fiber) return;
  __atomic_sub_fetch(&switches_left, 1, __ATOMIC_RELAXED);
  if (by_hand) switch_stack(&fiber->sp, *own_sp());
  else swapcontext(&fiber->context, own_context());
}
NOINLINE static char *take_slot(void) {
  char *block;
  do block = store[__atomic_fetch_add(&next_slot, 1, __ATOMIC_RELAXED) % SLOTS]; while (*block);
  if (yields_inside) yield();
  return block + 16;
}
static void *(*volatile taker)(size_t);
/* These two are allocators: what they return is theirs. */
NOINLINE void *fiber_take(size_t size) {
  (void)size;
  char *block = take_slot();
  KEEP(block);
  return block;
}
void *fiber_jump(size_t);
__attribute__((used)) static void *(*volatile jump_target)(size_t) = fiber_take;
__asm__(
    ".text\n.globl fiber_jump\n.type fiber_jump, @function\n"
    "fiber_jump:\n"
    "  pushq %rbx\n"
    "  movq jump_target(%rip), %rax\n"
    "  popq %rbx\n"
    "  jmpq *%rax\n"
    ".size fiber_jump, .-fiber_jump\n");
NOINLINE void fiber_give(void *block) { KEEP(block); }
SITE(00, malloc(n))
SITE(01, taker(n))
static void fiber_main(struct fiber *fiber) {
  while (__atomic_load_n(&switches_left, __ATOMIC_RELAXED) < (uint64_t)1 << 62) {
    size_t size = 16 + next_random(&fiber->random) % 200;
    if (yields_inside) {
      void *p = site_01(size); took(1, size);
      if (next_random(&fiber->random) % 64) { fiber_give(p); gave(1, size); }
      else ((char *)p)[-16] = 1; /* this slot is not used again */
    } else {
      void *p = site_00(size); took(0, size);
      yield();
      if (next_random(&fiber->random) % 64) { free(p); gave(0, size); }
      yield();
    }
  }
  fiber->is_done = 1;
  for (;;) yield();
}
static void enter(unsigned low, unsigned high) { fiber_main((struct fiber *)((uintptr_t)high << 32 | low)); }
__attribute__((used)) static void enter_by_hand(void) { fiber_main(*own()); }
static void make(int i) {
  struct fiber *fiber = &fibers[i];
  fiber->random = (uint64_t)i + 1;
  if (by_hand) {
    void **top = (void **)(stacks[i] + STACK - 64);
    *--top = 0; /* alignment at the entry, as after a call */
    *--top = (void *)enter_by_hand;
    top -= 6;
    memset(top, 0, 6 * sizeof *top);
    fiber->sp = top;
  } else {
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stacks[i];
    fiber->context.uc_stack.ss_size = STACK;
    makecontext(&fiber->context, (void (*)(void))enter, 2, (unsigned)(uintptr_t)fiber, (unsigned)((uintptr_t)fiber >> 32));
  }
}
static void *schedule(void *seed) {
  uint64_t random = (uintptr_t)seed;
  while (__atomic_load_n(&done, __ATOMIC_RELAXED) < FIBERS) {
    struct fiber *fiber = &fibers[next_random(&random) % FIBERS];
    if (__atomic_exchange_n(&fiber->is_taken, 1, __ATOMIC_ACQUIRE)) continue;
    if (!fiber->is_done) {
      *own() = fiber;
      if (by_hand) switch_stack(own_sp(), fiber->sp);
      else swapcontext(own_context(), &fiber->context);
      *own() = 0;
      if (fiber->is_done) __atomic_add_fetch(&done, 1, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&fiber->is_taken, 0, __ATOMIC_RELEASE);
  }
  return seed;
}
static pthread_barrier_t start;
static void *help(void *seed) {
  pthread_barrier_wait(&start);
  return schedule(seed);
}
int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "around";
  by_hand = argc > 2 && !strcmp(argv[2], "hand");
  switches_left = argument(argc, argv, 3, 10000);
  yields_inside = strcmp(mode, "around") != 0;
  taker = strcmp(mode, "jumps") ? fiber_take : fiber_jump;
  stacks = mmap(0, sizeof *stacks * FIBERS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  store = mmap(0, sizeof *store * SLOTS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stacks == MAP_FAILED || store == MAP_FAILED) die("no memory");
  for (int i = 0; i < FIBERS; i++) make(i);
  pthread_t second;
  int wander = !strcmp(mode, "wander");
  pthread_barrier_init(&start, 0, 2);
  if (wander && pthread_create(&second, 0, help, (void *)7)) die("pthread_create");
  ready();
  if (wander) pthread_barrier_wait(&start);
  schedule((void *)1);
  if (wander) pthread_join(second, 0);
  report();
  return 0;
}
