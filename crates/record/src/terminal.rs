//! The terminal: its width, and whether to use colours.

/// When to use colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Color {
    /// On a terminal
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

impl Color {
    /// Whether to use colours, given whether the output is a terminal.
    pub fn is_on(self, terminal: bool) -> bool {
        match self {
            Self::Auto => terminal && std::env::var_os("NO_COLOR").is_none(),
            Self::Always => true,
            Self::Never => false,
        }
    }
}

/// Number of columns of the terminal, if there is one.
pub fn width() -> Option<usize> {
    // SAFETY: `winsize` consists of integers, for which all zeros is a valid value.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    [libc::STDOUT_FILENO, libc::STDERR_FILENO].into_iter().find_map(|fd| {
        // SAFETY: `TIOCGWINSZ` writes at most one `winsize`, and `size` is one. If `fd` is not a terminal, the call
        // fails.
        let status = unsafe { libc::ioctl(fd, libc::TIOCGWINSZ, &raw mut size) };
        (status == 0 && size.ws_col > 0).then_some(usize::from(size.ws_col))
    })
}
