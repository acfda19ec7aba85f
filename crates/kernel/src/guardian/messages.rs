//! The daemon's requests to the guardian, as words of a message. A program and a file are sent along; a link and its
//! perf event come back.

use crate::sys::{How, UprobeTarget};

/// Maximum number of instructions in one request. Links to more are made without the guardian.
pub const MOST_POINTS: usize = 4096;
/// Words of the longest message.
pub const MOST_WORDS: usize = HEAD + 3 * MOST_POINTS;
/// Words before the offsets, cookies and semaphores.
const HEAD: usize = 6;
/// Maximum number of links in one request to release some.
pub const MOST_LET_GO: usize = HEAD - 1;

/// What the daemon asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Make a link and hold it as well. The program and the file come with the message.
    Link(LinkRequest<'a>),
    /// Release some links, side by side. The answer comes when all are closed.
    LetGo {
        /// Numbers of the links; 0 for none.
        numbers: [u64; MOST_LET_GO],
    },
    /// End. The daemon is exiting normally.
    End,
}

/// A link to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkRequest<'a> {
    /// Number with which it is released.
    pub number: u64,
    /// Kind of the link.
    pub how: How,
    /// What is linked, at most [`MOST_POINTS`] instructions. The path is not sent.
    pub target: UprobeTarget<'a>,
}

const MULTI: u64 = 1;
const PERF: u64 = 2;
const LET_GO: u64 = 3;
const END: u64 = 4;

impl<'a> Request<'a> {
    /// The request as words.
    pub fn words(&self) -> Vec<u64> {
        match self {
            Self::LetGo { numbers } => [&[LET_GO][..], &numbers[..]].concat(),
            Self::End => vec![END, 0, 0, 0, 0, 0],
            Self::Link(wanted) => {
                let (kind, first, second) = match wanted.how {
                    How::Multi { attach_type, flags } => (MULTI, attach_type, flags),
                    How::Perf { pmu, on_return } => (PERF, pmu, u32::from(on_return)),
                };
                let UprobeTarget { offsets, cookies, semaphores, pid, .. } = wanted.target;
                let (pid, count) = (pid.map_or(0, u64::from), offsets.len() as u64);
                let head = [kind, wanted.number, first.into(), second.into(), pid, count];
                let mut words = [&head[..], offsets, cookies, semaphores].concat();
                words.resize(head.len() + 3 * offsets.len(), 0);
                words
            }
        }
    }

    /// Parses words as a request. `None` if they are not a valid request.
    pub fn parse(words: &'a [u64]) -> Option<Self> {
        let (head, points) = words.split_first_chunk::<HEAD>()?;
        let [kind, number, first, second, pid, count] = *head;
        if !matches!(kind, MULTI | PERF) {
            let is_bare = points.is_empty();
            return match kind {
                LET_GO if is_bare => Some(Self::LetGo { numbers: [number, first, second, pid, count] }),
                END if is_bare => Some(Self::End),
                _ => None,
            };
        }
        let count = usize::try_from(count).ok().filter(|count| (1..=MOST_POINTS).contains(count))?;
        let (offsets, rest) = points.split_at_checked(count)?;
        let (cookies, semaphores) = rest.split_at_checked(count)?;
        if semaphores.len() != count {
            return None;
        }
        let semaphores = if semaphores.iter().all(|semaphore| *semaphore == 0) { &[] } else { semaphores };
        let (first, second) = (u32::try_from(first).ok()?, u32::try_from(second).ok()?);
        let how = if kind == MULTI {
            How::Multi { attach_type: first, flags: second }
        } else {
            How::Perf { pmu: first, on_return: second != 0 }
        };
        let pid = Some(u32::try_from(pid).ok()?).filter(|pid| *pid != 0);
        let target = UprobeTarget { path: c"", offsets, cookies, semaphores, pid };
        Some(Self::Link(LinkRequest { number, how, target }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_arrives_as_it_was_sent_and_nothing_else_is_one() {
        let multi = How::Multi { attach_type: 57, flags: 1 };
        let perf = How::Perf { pmu: 9, on_return: true };
        let link = |how, pid, offsets, cookies, semaphores| {
            let target = UprobeTarget { path: c"", offsets, cookies, semaphores, pid };
            Request::Link(LinkRequest { number: 7, how, target })
        };
        for request in [
            link(multi, Some(12), &[16, 32, u64::MAX], &[1, 2, 3], &[]),
            link(multi, Some(12), &[16, 32], &[1, 2], &[0, 64]),
            link(perf, None, &[16], &[u64::MAX], &[]),
            link(perf, None, &[16], &[u64::MAX], &[64]),
            Request::LetGo { numbers: [u64::MAX, 1, 2, 3, 0] },
            Request::End,
        ] {
            let words = request.words();
            assert_eq!(Request::parse(&words), Some(request));
            assert_eq!(Request::parse(&words[..words.len() - 1]), None, "cut off");
            assert_eq!(Request::parse(&[&words[..], &[0]].concat()), None, "too long");
        }
        assert_eq!(Request::parse(&[MULTI, 1, 48, 0, 0, 0]), None, "a link to nothing");
        assert_eq!(Request::parse(&[MULTI, 1, 48, 0, 0, u64::MAX]), None);
        assert_eq!(Request::parse(&[9, 1, 48, 0, 0, 0]), None);
    }
}
