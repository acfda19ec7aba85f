/* MODE ROUNDS: blocks of an arena on top of malloc (arena.c), and of malloc itself.
 *   plain   every call returns
 *   jump    each time that the arena allocates a chunk, longjmp leaves the call
 *   thread  each time that the arena allocates a chunk, the thread exits inside the call */
#include <setjmp.h>
#include "truth.h"
#include "arena.h"
SITE(00, arena_take(0, n))
SITE(01, arena_take_zeroed(0, n / 8, 8))
static void *to_resize;
SITE(02, arena_resize(0, to_resize, n))
SITE(03, malloc(n))
static void give(int site, void *p, size_t n) { arena_give(0, p); gave(site, n); }
static void plain(uint64_t rounds) {
  for (uint64_t r = 0; r < rounds; r++) {
    void *p = site_00(100); took(0, 100);
    if (r % 4) give(0, p, 100);
    p = site_01(800); took(1, 800);
    if (r % 4) give(1, p, 800);
    to_resize = site_00(100); took(0, 100);
    p = site_02(300); gave(0, 100); took(2, 300);
    if (r % 4) give(2, p, 300);
    p = site_03(50); took(3, 50);
    if (r % 4) { free(p); gave(3, 50); }
    p = site_00(40000); took(0, 40000);
    if (r % 4) { free(p); gave(0, 40000); }
  }
}
static sigjmp_buf out;
static void jump(void) { truth->abandoned++; siglongjmp(out, 1); }
static void leave(void) { truth->abandoned++; pthread_exit(0); }
static void *taking(void *unused) {
  for (;;) { site_00(3000); took(0, 3000); }
  return unused;
}
int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "plain";
  uint64_t rounds = argument(argc, argv, 2, 100);
  ready();
  if (!strcmp(mode, "plain")) plain(rounds);
  else if (!strcmp(mode, "jump")) {
    arena_took_chunk = jump;
    for (volatile uint64_t r = 0; r < rounds; r++) {
      if (!sigsetjmp(out, 1)) for (;;) { site_00(3000); took(0, 3000); }
      void *p = site_03(70); took(3, 70);
      if (r % 2) { free(p); gave(3, 70); }
    }
  } else if (!strcmp(mode, "thread")) {
    arena_took_chunk = leave;
    for (uint64_t r = 0; r < rounds; r++) {
      pthread_t id;
      if (pthread_create(&id, 0, taking, 0)) die("pthread_create");
      pthread_join(id, 0);
      void *p = site_03(70); took(3, 70);
      if (r % 2) { free(p); gave(3, 70); }
    }
  } else die("which mode?");
  report();
  return 0;
}
