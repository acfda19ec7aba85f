/* Forks without a pause until the first line; then prints whether each child, and each of theirs, computed what it should. All
 * of them allocate, and the first process checks its own sums meanwhile. */
#include "truth.h"
enum { CHILDREN = 3, BLOCKS = 200, MOST = 256 };
static volatile int over;
static uint64_t expected, forks, bad;

static uint64_t work(void) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < BLOCKS; i++) {
    size_t size = 1 + i % MOST;
    unsigned char *p = malloc(size);
    memset(p, (int)i, size);
    for (size_t k = 0; k < size; k++) sum = sum * 31 + p[k];
    free(p);
  }
  return sum;
}
static void child(void) {
  pid_t grandchild = fork();
  if (!grandchild) _exit(work() == expected ? 0 : 3);
  int status = 1;
  if (grandchild < 0 || waitpid(grandchild, &status, 0) != grandchild || status) _exit(4);
  _exit(work() == expected ? 0 : 5);
}
static void *fork_on(void *unused) {
  while (!over) {
    pid_t children[CHILDREN];
    for (int i = 0; i < CHILDREN; i++) {
      children[i] = fork();
      if (!children[i]) child();
      forks++;
    }
    bad += work() != expected;
    for (int i = 0; i < CHILDREN; i++) {
      int status = 1;
      bad += children[i] < 0 || waitpid(children[i], &status, 0) != children[i] || status;
    }
  }
  return unused;
}
int main(void) {
  pthread_t thread;
  expected = work();
  if (pthread_create(&thread, 0, fork_on, 0)) die("no thread");
  ready();
  over = 1;
  pthread_join(thread, 0);
  put_text(bad || !forks ? "BAD\n" : "all children ended well\n");
  wait_line();
  return 0;
}
