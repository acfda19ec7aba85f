//! Parser of the comments in heapbpf's pprof files.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

use super::newer;
use crate::estimates::{INUSE_SINCE, INUSE_UNKNOWN};
use crate::formats::{ALL_PROCESSES, ENDED_APART, HOOK, NO_NAMES, NOT_INLINE};
use crate::group::process_name;
use crate::loss_comment;
use crate::model::{Criterion, LossBound, Losses, Process, Unread};
use crate::proto::pprof as proto;
use crate::units;
use heapbpf_audit::{Hook, Missing};

/// Maximum number of comments that are kept, and maximum number of characters of each.
const MOST_COMMENTS: usize = 1_000;
const LONGEST_COMMENT: usize = 10_000;

/// A string of the table; empty if there is none with that number.
pub(super) fn text(head: &proto::Profile, id: i64) -> &str {
    usize::try_from(id).ok().and_then(|id| head.string_table.get(id)).map_or("", String::as_str)
}

/// Prefix of the first comment in our pprof files.
pub(super) const OUR_COMMENT: &str = "heapbpf ";

/// Prefixes of comments that are not remarks, because their contents are read from elsewhere or describe the recording.
const UNREAD: [&str; 3] = ["interval=", "probes in ", ALL_PROCESSES];

/// The contents of our comments.
#[derive(Default)]
pub(super) struct Comments {
    pub(super) version: String,
    pub(super) host: String,
    pub(super) unwind: String,
    pub(super) criterion: Criterion,
    pub(super) time: Option<SystemTime>,
    pub(super) unread: Option<Unread>,
    pub(super) ended_apart: bool,
    pub(super) notes: Vec<String>,
    /// Comments of a newer version that this one does not understand.
    pub(super) not_understood: BTreeSet<String>,
    /// Why a module's functions have no names, by module path.
    pub(super) unnamed: HashMap<String, Arc<str>>,
    /// Descriptions of processes by process name.
    processes: HashMap<String, String>,
    /// Losses by process name, with slack and the original comment.
    pub(super) losses: HashMap<String, (Losses, LossBound, String)>,
}

impl Comments {
    pub(super) fn new(head: &proto::Profile) -> Self {
        let mut comments = Self::default();
        for &comment in head.comment.iter().take(MOST_COMMENTS) {
            let comment = text(head, comment);
            let comment = &comment[..comment.floor_char_boundary(LONGEST_COMMENT)];
            if let Some(rest) = comment.strip_prefix(OUR_COMMENT) {
                let (version, rest) = rest.split_once(" on ").unwrap_or((rest, ""));
                comments.version = version.into();
                comments.host = rest.split_once(": ").map_or("", |(host, _)| host).into();
            } else if let Some(name) = comment.strip_prefix("criterion=") {
                comments.criterion = Criterion::from_name(name).unwrap_or_else(|| {
                    comments.not_understood.insert(newer::shown(comment));
                    Criterion::default()
                });
            } else if let Some(unwind) = comment.strip_prefix("unwind=") {
                comments.unwind = unwind.into();
            } else if let Some(time) = comment.strip_prefix("time=") {
                comments.time = units::parse_rfc3339(time);
            } else if let Some(unread) = comment.strip_prefix("unread=") {
                comments.unread = parse_unread(unread);
            } else if comment == ENDED_APART {
                comments.ended_apart = true;
            } else if let Some((path, reason)) = comment.strip_prefix(NO_NAMES).and_then(|rest| rest.split_once(": ")) {
                comments.unnamed.insert(path.into(), reason.into());
            } else if let Some((name, lost, counted_later)) = loss_comment::read(comment) {
                let (losses, slack, _) = comments.losses.entry(name.into()).or_insert_with(|| {
                    let (losses, slack) = Default::default();
                    (losses, slack, comment.into())
                });
                losses.add(&lost);
                slack.add(&counted_later);
            } else if let Some((name, said)) = process_comment(comment) {
                comments.processes.insert(name.into(), said.into());
            } else if is_setting(comment) && newer::is_newer(&comments.version) {
                comments.not_understood.insert(newer::shown(comment));
            } else if !comment.is_empty() && !UNREAD.iter().any(|begin| comment.starts_with(begin)) {
                comments.notes.push(comment.into());
            }
        }
        comments
    }

    /// Completes a process with the comment about it.
    pub(super) fn describe(&mut self, process: &mut Process) {
        if let Some((losses, slack, _)) = self.losses.remove(&process_name(process)) {
            (process.losses, process.slack) = (losses, slack);
        }
        let Some(said) = self.processes.get(&process_name(process)) else { return };
        let coverage = said.split([',', ';']).next().unwrap_or(said);
        let counted = said.split_once(", counted exactly: ").map_or("", |(_, counted)| counted);
        let rounded = coverage.trim_end_matches(" %");
        process.coverage = match rounded {
            ">99.9" => 0.9999,
            "<0.1" => 0.0001,
            _ => rounded.parse::<f64>().map_or(1.0, |percent| (percent / 100.0).clamp(0.0, 1.0)),
        };
        process.hook = said
            .strip_prefix(coverage)
            .and_then(|rest| rest.strip_prefix(HOOK))
            .and_then(|rest| Hook::from_name(rest.split([',', ';']).next().unwrap_or_default()));
        process.not_inline = said.rsplit_once(NOT_INLINE).map(|(_, why)| why.to_owned());
        process.missing.extend(said.contains(Missing::UNSEEN).then(Missing::unseen));
        process.inuse_unknown |= said.contains(INUSE_UNKNOWN);
        let since = said.split_once(INUSE_SINCE).and_then(|(_, rest)| rest.split([',', ';']).next());
        process.inuse_since = since.and_then(units::parse_rfc3339);
        if let Some((bytes, objects)) = counted.split_once(" bytes in ") {
            process.exact_alloc_bytes = bytes.parse().ok();
            process.exact_alloc_objects = objects.split(' ').next().and_then(|objects| objects.parse().ok());
        }
    }
}

/// Whether a comment is a `key=value` that this version does not know.
fn is_setting(comment: &str) -> bool {
    let key = comment.split_once('=').map_or("", |(key, _)| key);
    let is_key = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    is_key && !UNREAD.iter().any(|begin| comment.starts_with(begin))
}

/// Parses `RECORDS/OF`.
fn parse_unread(text: &str) -> Option<Unread> {
    let (records, of) = text.split_once('/')?;
    let (records, of) = (records.parse::<u64>().ok()?, of.parse().ok()?);
    Some(Unread { records: records.min(of), of })
}

/// Splits a comment about a process into the name and the description.
fn process_comment(comment: &str) -> Option<(&str, &str)> {
    comment.strip_prefix("process ")?.split_once(": coverage ")
}
