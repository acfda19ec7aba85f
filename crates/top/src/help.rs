//! The list of keys.

/// Keys and what they do.
pub(crate) const KEYS: &[(&str, &str)] = &[
    ("↑ ↓  PgUp PgDn  Home End", "move (also k j g G)"),
    ("Enter  →", "go inside: a program, a function's callees, a branch"),
    ("Esc  ←", "go back"),
    ("Tab", "stacks or functions"),
    ("s   r", "sort by the next column; reverse the order"),
    ("1 … 7", "by in use, growth, rate, count, lifetime, name, RSS"),
    ("f", "filter: only rows whose name has this text"),
    ("/   n N", "search for a name; next, previous"),
    ("c   d", "tree of callers; of callees (down)"),
    ("t", "tree of all calls, from the outermost"),
    ("F", "flame view; Enter zooms in, Esc out"),
    ("Space", "freeze; again: resume"),
    ("m   M", "mark a baseline (*: significant growth since); clear"),
    ("w", "write a profile here"),
    ("?   q", "this help; quit"),
];

/// The keys shown at the bottom of the screen. Where space is short, those with the highest number are dropped first.
pub(crate) const BOTTOM: &[(u8, &str, &str)] = &[
    (0, "q", "quit"),
    (0, "?", "help"),
    (1, "Enter", "inside"),
    (1, "Esc", "back"),
    (2, "Tab", "stacks/functions"),
    (2, "s", "sort"),
    (2, "f", "filter"),
    (3, "/", "search"),
    (2, "Space", "freeze"),
    (3, "c", "callers"),
    (4, "d", "callees"),
    (5, "t", "tree"),
    (3, "F", "flame"),
    (3, "m", "mark"),
    (4, "w", "write"),
];
