//! The losses of a process as a line of text for pprof comments, and the parser for such lines.

use super::model::{LossBound, Losses};

/// Prefix of such a line.
const BEGIN: &str = "losses ";

/// The line for a process, for example `losses server (42): alloc=3/1536 interval=524288`; pairs are numbers of samples
/// and their bytes. `None` if the process has neither losses nor slack.
pub fn written(name: &str, losses: &Losses, slack: &LossBound) -> Option<String> {
    if losses.is_none() && slack.is_none() {
        return None;
    }
    let bounds = [
        ("alloc", &losses.alloc),
        ("inuse_missing", &losses.inuse_missing),
        ("inuse_stale", &losses.inuse_stale),
        ("slack", slack),
    ];
    let mut line = format!("{BEGIN}{name}:");
    for (key, bound) in bounds.into_iter().filter(|(_, bound)| !bound.is_none()) {
        line.push_str(&format!(" {key}={}/{}", bound.samples, bound.sampled_bytes));
    }
    if losses.interval > 0 {
        line.push_str(&format!(" interval={}", losses.interval));
    }
    let flags = [
        ("peak_unknown", losses.peak_unknown),
        ("inuse_unbounded", losses.inuse_unbounded),
        ("unbounded", losses.unbounded),
        ("weights_unproven", losses.weights_unproven),
    ];
    for (key, _) in flags.into_iter().filter(|(_, is_set)| *is_set) {
        line.push_str(&format!(" {key}=1"));
    }
    Some(line)
}

/// Parses such a line into process name, losses and slack. `None` for any other line.
pub fn read(line: &str) -> Option<(&str, Losses, LossBound)> {
    let (name, facts) = line.strip_prefix(BEGIN)?.rsplit_once(": ")?;
    let (mut losses, mut slack) = (Losses::default(), LossBound::default());
    for fact in facts.split(' ') {
        let (key, value) = fact.split_once('=')?;
        match key {
            "alloc" => losses.alloc = bound(value)?,
            "inuse_missing" => losses.inuse_missing = bound(value)?,
            "inuse_stale" => losses.inuse_stale = bound(value)?,
            "slack" => slack = bound(value)?,
            "interval" => losses.interval = value.parse().ok()?,
            "peak_unknown" => losses.peak_unknown = value == "1",
            "inuse_unbounded" => losses.inuse_unbounded = value == "1",
            "unbounded" => losses.unbounded = value == "1",
            "weights_unproven" => losses.weights_unproven = value == "1",
            _ => return None,
        }
    }
    Some((name, losses, slack))
}

fn bound(text: &str) -> Option<LossBound> {
    let (samples, sampled_bytes) = text.split_once('/')?;
    Some(LossBound { samples: samples.parse().ok()?, sampled_bytes: sampled_bytes.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_back_whatever_the_process_is_called() {
        let bound = |samples, sampled_bytes| LossBound { samples, sampled_bytes };
        let losses = Losses {
            alloc: bound(3, u64::MAX),
            inuse_stale: bound(1, 0),
            interval: 4_096,
            peak_unknown: true,
            ..Losses::default()
        };
        for name in ["server (42)", "a: b=c (1)", "losses x: alloc=1/2 (3)"] {
            for (losses, slack) in
                [(losses, bound(0, 7)), (Losses { unbounded: true, weights_unproven: true, ..losses }, bound(0, 0))]
            {
                let line = written(name, &losses, &slack).expect("there are losses");
                assert_eq!(read(&line), Some((name, losses, slack)), "{line}");
            }
        }
        assert_eq!(written("x", &Losses { interval: 9, ..Losses::default() }, &LossBound::default()), None);
    }

    #[test]
    fn other_lines_are_left_alone() {
        for line in
            ["losses", "losses x", "losses x: alloc=1", "losses x: alloc=-1/2", "losses x: more=1/2", "x: alloc=1/2"]
        {
            assert_eq!(read(line), None, "{line}");
        }
        assert_eq!(read("losses x: alloc=99999999999999999999999/1"), None);
    }
}
