/* OPS: a thread writes more than fits into a pipe whose reader is slow, all the time, and ends the program if a call comes back with a part
 * of it. Then OPS pairs in the first thread, half of which stay. */
#include "truth.h"
enum { PIECE = 4096, BYTES = 1 << 20 };
SITE(00, malloc(n))
static int fds[2];
static char bytes[BYTES];

static void *reads(void *unused) {
  static char piece[PIECE];
  while (read(fds[0], piece, PIECE) > 0) usleep(1000);
  return unused;
}
static void *writes(void *unused) {
  while (write(fds[1], bytes, BYTES) == BYTES) {}
  die("a write came back early");
  return unused;
}
int main(int argc, char **argv) {
  uint64_t ops = argument(argc, argv, 1, 2000);
  pthread_t threads[2];
  if (pipe(fds)) die("no pipe");
  pthread_create(&threads[0], 0, reads, 0);
  pthread_create(&threads[1], 0, writes, 0);
  ready();
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
