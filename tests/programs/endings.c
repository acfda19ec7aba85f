/* MODE N: a process or its threads end in different ways.
 *   sigkill     allocates N blocks, reports, and kills itself
 *   threads     N threads one after another, each of which leaves one of its three blocks allocated */
#include <signal.h>
#include "truth.h"
SITE(00, malloc(n))
SITE(01, malloc(n))
static void *three_blocks(void *unused) {
  for (int i = 0; i < 3; i++) {
    void *p = site_01(1000); took(1, 1000);
    if (i) { free(p); gave(1, 1000); }
  }
  return unused;
}
int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "sigkill";
  uint64_t many = argument(argc, argv, 2, 200);
  ready();
  for (uint64_t k = 0; k < many; k++) {
    void *p = site_00(500); took(0, 500);
    if (k % 4) { free(p); gave(0, 500); }
  }
  if (!strcmp(mode, "threads"))
    for (uint64_t k = 0; k < many; k++) {
      pthread_t id;
      if (pthread_create(&id, 0, three_blocks, 0)) die("pthread_create");
      pthread_join(id, 0);
    }
  report();
  if (!strcmp(mode, "sigkill")) kill(getpid(), SIGKILL);
  return 0;
}
