//! How requests to the helper process that stops others, and its answers, are serialised. Pure.

/// Serialises bytes as base64, which is little longer.
pub(crate) mod base64_bytes {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD_NO_PAD;
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(crate) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        STANDARD_NO_PAD.encode(bytes).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        STANDARD_NO_PAD.decode(String::deserialize(from)?).map_err(D::Error::custom)
    }
}

/// Serialises a kernel error as its number. An error without a number becomes an input/output error.
pub(crate) mod os_error {
    use std::io;

    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(crate) fn serialize<S: Serializer>(error: &io::Error, to: S) -> Result<S::Ok, S::Error> {
        error.raw_os_error().unwrap_or(libc::EIO).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<io::Error, D::Error> {
        i32::deserialize(from).map(io::Error::from_raw_os_error)
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::Duration;

    use crate::error::{Error, Refusal};
    use crate::maps::Maps;
    use crate::plan::{Data, Draft, Pages, Plan};
    use crate::work::{FileId, Mapped, Planned, Request, Work};

    #[test]
    fn a_request_arrives_as_it_was_sent() {
        let maps = Maps::parse("7f0000000000-7f0000001000 r-xp 00000000 fe:00 9 /lib/libc.so.6", 0);
        let draft = Draft {
            name: "heapbpf-inline".into(),
            base: 0x7e00_0000_0000,
            bytes: 0x2000,
            text: (0..4096).map(|byte| byte as u8).collect(),
            data: vec![Data { range: 0x1000..0x2000, is_wiped_on_fork: true, initial: vec![1, 2, 3] }],
            pages: vec![Pages { start: 0x7f00_0000_0000, original: vec![0x90; 4096], edited: vec![0xcc; 4096] }],
            displaced: Vec::new(),
        };
        let plan = Plan::new(draft, &maps).expect("it fits");
        let file = FileId { device: 1, inode: u64::MAX };
        let planned = Planned { plan: plan.clone(), files: vec![file.clone()], memfd_flags: 3 };
        let work = Work::Replace { planned, mapped: Mapped(file), is_asked: true };
        let limit = Duration::from_millis(20);
        let (system_call, restorer, restorer_code, filtered) = (1, 2, vec![0x58, 0xc3], vec![(7, true), (8, false)]);
        let (start, spares_calls, work) = (5, true, &work);
        let request =
            Request { pid: 7, start, system_call, restorer, restorer_code, filtered, spares_calls, limit, work };
        let sent = serde_json::to_vec(&request).expect("it can be written");
        let arrived: Request<Work> = serde_json::from_slice(&sent).expect("it can be read");
        assert_eq!((arrived.pid, arrived.limit, arrived.spares_calls), (7, limit, true));
        assert_eq!(arrived.filtered, request.filtered);
        let Work::Replace { planned, mapped: Mapped(file), is_asked: true } = arrived.work else {
            panic!("other work")
        };
        assert_eq!((planned.plan, &planned.files[0], planned.memfd_flags), (plan, &file, 3));
        assert!(sent.len() < 4 * 4096 * 3 / 2, "{} bytes", sent.len());
    }

    #[test]
    fn an_error_is_told_as_it_happened() {
        let denied = || io::Error::from_raw_os_error(libc::EACCES);
        for error in [
            Error::Call { call: "mmap".into(), source: denied() },
            Error::Refused(Refusal::Look { what: "its memory".into(), source: denied() }),
            Error::Refused(Refusal::UnknownSeccomp(denied())),
            Error::Busy { why: crate::Busy::Slow, stopped: Duration::from_micros(7) },
            Error::Patched(u64::MAX),
        ] {
            let sent = serde_json::to_vec(&Err::<(), _>(&error)).expect("it can be written");
            let arrived: Result<(), Error> = serde_json::from_slice(&sent).expect("it can be read");
            assert_eq!(arrived.expect_err("an error").to_string(), error.to_string());
        }
    }
}
