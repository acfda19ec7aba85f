// A known population: 20,000 sessions (of 25,000, every fifth is deleted), 5,000 baskets in another thread's arena, 3 archives with
// mappings of their own, and 7,000 plain blocks. Afterwards another thread makes and deletes sessions, of which 2,048 are
// there at a time, and as many plain blocks. With the argument 1, a size in the main arena is wrong.
#include <new>
extern "C" {
#include "truth.h"
}
namespace shop {
struct Item {
  virtual ~Item() {}
  virtual int price() { return 1; }
};
struct Session : Item {
  uint64_t data[7];
  int price() override { return (int)data[0]; }
};
namespace {
struct Basket : Item { char goods[2000]; };
}
template <typename T> struct Archive : Item { T all[100000]; };
}
enum { SESSIONS = 25000, BASKETS = 5000, PLAIN = 7000 };
static void *kept[SESSIONS + BASKETS + PLAIN + 3];
static int used;
static pthread_barrier_t filled;

template <typename T> NOINLINE static T *keep() {
  T *made = new T;
  KEEP(made);
  kept[used++] = made;
  return made;
}
static void *others(void *) {
  for (int i = 0; i < BASKETS; i++) keep<shop::Basket>();
  pthread_barrier_wait(&filled);
  for (;;) pause();
  return nullptr;
}
static void *rounds(void *) {
  static void *slots[4096];
  for (uint64_t i = 0, random = 1;; i++) {
    // Each slot in turn, in an order that looks random. The odd ones are for sessions.
    void **slot = slots + i * 2654435761u % 4096;
    if (*slot && i % 2) delete (shop::Session *)*slot;
    else free(*slot);
    void *made = i % 2 ? new shop::Session : malloc(next_random(&random) % 3000);
    KEEP(made);
    *slot = made;
    if (i == 4096) pthread_barrier_wait(&filled);
  }
  return nullptr;
}
int main(int argc, char **argv) {
  pthread_t id;
  pthread_barrier_init(&filled, nullptr, 2);
  pthread_create(&id, nullptr, others, nullptr);
  pthread_barrier_wait(&filled);
  for (int i = 0; i < SESSIONS; i++) keep<shop::Session>();
  for (int i = 0; i < SESSIONS; i += 5) delete (shop::Session *)kept[used - 1 - i];
  for (int i = 0; i < PLAIN; i++) kept[used++] = memset(malloc(100), 1, 100);
  for (int i = 0; i < 3; i++) keep<shop::Archive<int>>();
  if (argument(argc, argv, 1, 0)) {
    // The size of a block in the middle of the main arena.
    ((size_t *)kept[used / 2])[-1] = 3;
  }
  ready();
  pthread_create(&id, nullptr, rounds, nullptr);
  pthread_barrier_wait(&filled);
  step();
  report();
  return 0;
}
