// PLUGIN [PAUSE]: eight threads that check all they have in memory, under a signal each millisecond, with forks, exceptions and
// a library that is loaded and unloaded. Each pauses for PAUSE microseconds (500) after each 64 operations. Prints READY and its
// pid, and the number of operations after a line on its input.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <malloc.h>
#include <new>
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 8, SLOTS = 512 };
struct block { uint64_t size, seed, kind; };  // at the beginning of each block
static std::atomic<block *> slots[SLOTS];
static std::atomic<uint64_t> operations, handled;
static std::atomic<bool> stop;

static void fail(const char *what) {
  (void)!write(2, what, strlen(what));
  (void)!write(2, "\n", 1);
  abort();
}
static uint64_t mix(uint64_t &state) {
  uint64_t z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
static void fill(block *b, uint64_t from) {
  uint8_t *bytes = (uint8_t *)b;
  for (uint64_t i = from; i < b->size; i++) bytes[i] = (uint8_t)(b->seed + i * 7);
}
static void check(const block *b, uint64_t up_to) {
  const uint8_t *bytes = (const uint8_t *)b;
  for (uint64_t i = sizeof *b; i < up_to; i++)
    if (bytes[i] != (uint8_t)(b->seed + i * 7)) fail("a block is not as it was left");
}
static block *take(uint64_t &random) {
  uint64_t size = sizeof(block) + (mix(random) % 16 ? mix(random) % 600 : mix(random) % 200000), kind = mix(random) % 6;
  void *p = nullptr;
  switch (kind) {
  case 0: p = malloc(size); break;
  case 1:
    p = calloc(1, size);
    for (uint64_t i = 0; i < size; i += 61) if (((uint8_t *)p)[i]) fail("calloc gave what is not zero");
    break;
  case 2: if (posix_memalign(&p, 64, size)) p = nullptr; break;
  case 3: p = ::operator new(size); break;
  case 4: p = ::operator new[](size, std::nothrow); break;
  case 5: p = realloc(nullptr, size); break;
  }
  if (!p || (kind == 2 && (uintptr_t)p % 64)) fail("an allocation went wrong");
  block *b = (block *)p;
  *b = {size, mix(random), kind};
  fill(b, sizeof *b);
  return b;
}
static void give(block *b) {
  check(b, b->size);
  if (b->kind == 3) ::operator delete(b);
  else if (b->kind == 4) ::operator delete[](b);
  else free(b);
}
static block *resize(block *b, uint64_t size) {
  check(b, b->size);
  uint64_t before = b->size;
  b = (block *)realloc(b, size);
  if (!b) fail("realloc went wrong");
  b->size = size;
  check(b, before < size ? before : size);
  fill(b, sizeof *b);
  return b;
}
struct noted { int &count; ~noted() { count++; } };
__attribute__((noinline)) static void deep(int depth, int &unwound) {
  noted n{unwound};
  if (!depth) throw (uint64_t)0x600d;
  deep(depth - 1, unwound);
}
static void throw_and_catch() {
  int unwound = 0;
  try { deep(5, unwound); fail("it did not throw"); } catch (uint64_t value) {
    if (value != 0x600d || unwound != 6) fail("an exception is not what was thrown");
  }
  try {
    volatile size_t huge = (size_t)1 << 47;  // more than there are addresses
    void *p = ::operator new(huge);
    __asm__ volatile("" : : "r"(p) : "memory");
    fail("it cannot be that large");
  } catch (const std::bad_alloc &) {}
}
static void fork_and_wait(uint64_t &random) {
  pid_t child = fork();
  if (child < 0) return;
  if (!child) {
    for (int i = 0; i < 200; i++) give(take(random));
    _exit(17);
  }
  int status;
  while (waitpid(child, &status, 0) < 0) {}
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 17) fail("a child came to harm");
}
static const char *plugin;
static useconds_t pause_us = 500;
static void *work(void *number) {
  uint64_t me = (uint64_t)number, random = me * 977;
  for (uint64_t i = 1; !stop; i++) {
    std::atomic<block *> &slot = slots[mix(random) % SLOTS];
    block *mine = slot.exchange(nullptr);
    if (!mine) mine = take(random);
    else if (mine->kind != 2 && mine->kind != 3 && mine->kind != 4 && mix(random) % 3 == 0)
      mine = resize(mine, sizeof(block) + mix(random) % 3000);
    else { give(mine); mine = nullptr; }
    block *nobody = nullptr;
    if (mine && !slot.compare_exchange_strong(nobody, mine)) give(mine);
    if (i % 256 == 0) throw_and_catch();
    if (me == 0 && i % 2000 == 0) fork_and_wait(random);
    if (me == 1 && i % 500 == 0) {
      void *library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
      void *(*site)(size_t) = library ? (void *(*)(size_t))dlsym(library, "site_30") : nullptr;
      if (!site) fail("the library cannot be loaded");
      free(site(300));
      dlclose(library);
    }
    operations.fetch_add(1, std::memory_order_relaxed);
    // Others need the processors, too.
    if (i % 64 == 0) usleep(pause_us);
  }
  return nullptr;
}
static void on_alarm(int) { handled.fetch_add(1, std::memory_order_relaxed); }
int main(int argc, char **argv) {
  plugin = argc > 1 ? argv[1] : "";
  if (argc > 2) pause_us = (useconds_t)atoi(argv[2]);
  struct sigaction action = {};
  action.sa_handler = on_alarm, action.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &action, nullptr);
  itimerval each = {{0, 1000}, {0, 1000}};
  setitimer(ITIMER_REAL, &each, nullptr);
  pthread_t threads[THREADS];
  for (uint64_t i = 0; i < THREADS; i++) pthread_create(&threads[i], nullptr, work, (void *)i);
  printf("READY %d\n", getpid()), fflush(stdout);
  char c = 0;
  while (c != '\n') if (read(0, &c, 1) == 0) break;
  stop = true;
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
  for (auto &slot : slots) if (block *b = slot.exchange(nullptr)) give(b);
  printf("OK %lu operations, %lu signals\n", operations.load(), handled.load()), fflush(stdout);
  return 0;
}
