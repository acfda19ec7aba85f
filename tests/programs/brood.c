/* MODE CHILDREN ROUNDS: a process and its children, which are short. Each allocates ROUNDS blocks and frees every fourth.
 *   short   before READY one child runs and ends; then CHILDREN children, one after another: every second one replaces its
 *           program first. Each ends at once.
 *   master  CHILDREN children are there and wait at STEP; then each allocates, and has a short child of its own.
 *   late    there is no child before READY; then each of CHILDREN children allocates. The first ends, the others wait at
 *           STEP, allocate again, and wait for the end of the first process.
 * The report covers all of them together under the first process's id. Slot 0: only that one. */
#include "truth.h"
SITE(00, malloc(n)) /* the first process */
SITE(01, malloc(n)) /* children that were forked */
SITE(02, malloc(n)) /* children that replaced their program */
SITE(03, malloc(n)) /* their children */

static void work(int site, void *(*allocate)(size_t), uint64_t rounds) {
  for (uint64_t k = 0; k < rounds; k++) {
    void *p = allocate(100);
    took(site, 100);
    if (k % 4 == 0) { free(p); gave(site, 100); }
  }
}
static pid_t fork_or_die(void) {
  pid_t child = fork();
  if (child < 0) die("fork");
  return child;
}
static void wait_for(pid_t child) {
  int status;
  if (waitpid(child, &status, 0) != child || status) die("a child failed");
}
static void short_children(char *name, uint64_t children, uint64_t rounds, char *rounds_text) {
  for (uint64_t c = 0; c < children; c++) {
    pid_t child = fork_or_die();
    if (!child && c % 2) {
      execl("/proc/self/exe", name, "replaced", "0", rounds_text, (char *)0);
      _exit(1);
    }
    if (!child) {
      work(1, site_01, rounds);
      _exit(0);
    }
    wait_for(child);
  }
}
static void wait_until(int released) {
  char c;
  while (read(released, &c, 1) < 0 && errno == EINTR) {}
}
static void late_children(uint64_t children, uint64_t rounds) {
  int release[2], done[2], end[2];
  if (pipe(release) || pipe(done) || pipe(end)) die("pipe");
  pid_t first = 0;
  for (uint64_t c = 0; c < children; c++) {
    pid_t child = fork_or_die();
    if (!c) first = child;
    if (child) continue;
    close(release[1]);
    close(end[1]);
    work(1, site_01, rounds);
    if (c) {
      wait_until(release[0]);
      work(1, site_01, rounds);
      close(done[1]);
      wait_until(end[0]);
    }
    _exit(0);
  }
  step();
  close(release[1]);
  close(done[1]);
  wait_until(done[0]);
  wait_for(first);
}
static void wait_and_work(int released, uint64_t rounds) {
  wait_until(released);
  work(1, site_01, rounds);
  pid_t child = fork_or_die();
  if (!child) {
    work(3, site_03, rounds);
    _exit(0);
  }
  wait_for(child);
  _exit(0);
}
int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "short";
  uint64_t children = argument(argc, argv, 2, 100), rounds = argument(argc, argv, 3, 50);
  if (!strcmp(mode, "replaced")) {
    truth_map(TRUTH_FD);
    work(2, site_02, rounds);
    _exit(0);
  }
  int is_master = !strcmp(mode, "master"), is_late = !strcmp(mode, "late");
  if (!is_master && !is_late) {
    pid_t first = fork_or_die();
    if (!first) _exit(0);
    wait_for(first);
  }
  ready();
  if (is_late) {
    late_children(children, rounds);
  } else if (is_master) {
    int release[2];
    if (pipe(release)) die("pipe");
    for (uint64_t c = 0; c < children; c++) {
      if (fork_or_die()) continue;
      close(release[1]);
      wait_and_work(release[0], rounds);
    }
    step();
    work(0, site_00, rounds);
    close(release[0]);
    close(release[1]);
    for (uint64_t c = 0; c < children; c++) {
      int status;
      if (wait(&status) < 0 || status) die("a child failed");
    }
  } else {
    work(0, site_00, rounds);
    short_children(argv[0], children, rounds, argc > 3 ? argv[3] : "50");
  }
  report();
  return 0;
}
