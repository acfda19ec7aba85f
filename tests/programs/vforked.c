/* OPS: another process runs in this one's memory (vfork) until the first line; then a step, and OPS pairs, half of which stay.
 */
#include "truth.h"
#include <signal.h>
#include <sys/prctl.h>
SITE(00, malloc(n))
static volatile int over;

static void *parent_main(void *unused) {
  pid_t child = vfork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (!over) usleep(1000);
    _exit(0);
  }
  if (child < 0) die("cannot vfork");
  return unused;
}
int main(int argc, char **argv) {
  uint64_t ops = argument(argc, argv, 1, 2000);
  pthread_t id;
  pthread_create(&id, 0, parent_main, 0);
  ready();
  over = 1;
  pthread_join(id, 0);
  step();
  for (uint64_t k = 0; k < ops; k++) {
    size_t size = 32 + k % 64;
    void *p = site_00(size);
    took(0, size);
    if (k % 2) {
      free(p);
      gave(0, size);
    }
  }
  report();
  return 0;
}
