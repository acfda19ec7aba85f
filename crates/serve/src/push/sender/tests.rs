//! Tests of delivery to local receivers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use heapbpf_profile::proto::otlp::{ExportProfilesPartialSuccess, ExportProfilesServiceResponse};
use heapbpf_profile::testing;

use super::super::batch::batches;
use super::super::spool::SpoolOptions;
use super::*;

/// A guard against hanging: longer than any step here takes. It measures nothing.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, Default)]
struct Received {
    head: String,
    body: Vec<u8>,
}

/// Sends until nothing is left in the queue, and closes it.
fn deliver(destination: &Destination, queue: &Queue) {
    std::thread::scope(|scope| {
        scope.spawn(|| run(destination, queue));
        assert!(queue.wait_until_empty(Instant::now() + PATIENCE));
        queue.close();
    });
}

/// A receiver that answers with these statuses in turn, then always with 200.
fn receiver(listener: TcpListener, statuses: &'static [u16]) -> Arc<Mutex<Vec<Received>>> {
    let received: Arc<Mutex<Vec<Received>>> = Arc::default();
    let taken = Arc::clone(&received);
    std::thread::spawn(move || {
        let mut statuses = statuses.iter();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            while let Some(request) = read_request(&mut stream) {
                let status = statuses.next().copied().unwrap_or(200);
                if status == 200 {
                    taken.lock().unwrap().push(request);
                }
                let answer = format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n");
                if stream.write_all(answer.as_bytes()).is_err() {
                    break;
                }
            }
        }
    });
    received
}

fn read_request(stream: &mut impl Read) -> Option<Received> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("content-length").then(|| value.parse().unwrap())
    });
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body).ok()?;
    Some(Received { head, body })
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn numbered(number: u8) -> Batch {
    Batch { path: "/in".into(), content_type: "a/b".into(), body: vec![number; 100] }
}

#[test]
fn answers_that_are_about_the_request_are_for_good_and_the_rest_is_tried_again() {
    let (listener, address) = listener();
    let received = receiver(listener, &[503, 500, 200, 400, 429, 200]);
    let destination = Destination::parse(&format!("http://key@{address}/in")).unwrap();
    let queue = Queue::in_memory();
    (1..=3).for_each(|number| assert_eq!(queue.push(&numbered(number)), None));
    deliver(&destination, &queue);
    let received = received.lock().unwrap();
    let bodies: Vec<u8> = received.iter().map(|request| request.body[0]).collect();
    assert_eq!(bodies, [1, 3], "the second one was refused for good");
    let counts = queue.counts();
    assert_eq!((counts.delivered, counts.rejected, counts.dropped, counts.failures), (2, 1, 0, 3));
    let head = received[0].head.to_lowercase();
    assert!(head.starts_with("post /in ") && head.contains("authorization: bearer key"), "{head}");
}

/// Neither the profile nor the token is sent to a redirect's target.
#[test]
fn redirects_are_followed_nowhere() {
    let (elsewhere, elsewhere_address) = listener();
    let elsewhere = receiver(elsewhere, &[]);
    let (first, address) = listener();
    let asked = Arc::new(Mutex::new(0));
    let count = Arc::clone(&asked);
    std::thread::spawn(move || {
        let codes = [301, 302, 303, 307, 308];
        for (stream, code) in first.incoming().zip(codes.iter().cycle()) {
            let mut stream = stream.unwrap();
            if read_request(&mut stream).is_none() {
                continue;
            }
            *count.lock().unwrap() += 1;
            let place = format!("http://{elsewhere_address}/in");
            let answer =
                format!("HTTP/1.1 {code} X\r\nLocation: {place}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    let destination = Destination::parse(&format!("http://key@{address}/in")).unwrap();
    let mut wire = Wire::open(&destination).unwrap();
    for code in [301, 302, 303, 307, 308] {
        assert_eq!(wire.send(&destination, &numbered(1)), Outcome::Failed(format!("status {code}")));
    }
    assert_eq!(*asked.lock().unwrap(), 5);
    assert!(elsewhere.lock().unwrap().is_empty());
}

#[test]
fn a_receiver_that_was_away_gets_everything_in_order_also_over_a_restart() {
    let (away, address) = listener();
    // Nothing listens there at first.
    drop(away);
    let dir = tempfile::tempdir().unwrap();
    let options = SpoolOptions { dir: dir.path().into(), most_bytes: 1 << 20 };
    let destination = Destination::parse(&format!("http://{address}/in")).unwrap();
    let queue = Queue::on_disk(&options, &destination.shown()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| run(&destination, &queue));
        (1..=5).for_each(|number| assert_eq!(queue.push(&numbered(number)), None));
        let begun = Instant::now();
        while queue.counts().failures == 0 {
            assert!(begun.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(5));
        }
        queue.close();
    });
    assert_eq!((queue.counts().delivered, queue.counts().waiting), (0, 5));
    drop(queue);

    let received = receiver(TcpListener::bind(address).unwrap(), &[]);
    let queue = Queue::on_disk(&options, &destination.shown()).unwrap();
    queue.push(&numbered(6));
    deliver(&destination, &queue);
    let bodies: Vec<u8> = received.lock().unwrap().iter().map(|request| request.body[0]).collect();
    assert_eq!(bodies, [1, 2, 3, 4, 5, 6]);
}

#[test]
fn otlp_over_http_arrives_as_the_collectors_request() {
    let (listener, address) = listener();
    let received = receiver(listener, &[]);
    let destination = Destination::parse(&format!("otlp+http://{address}")).unwrap();
    let batch = batches(&destination, &testing::small()).unwrap();
    assert_eq!(Wire::open(&destination).unwrap().send(&destination, &batch), Outcome::Delivered);
    let request = received.lock().unwrap()[0].clone();
    assert!(request.head.starts_with("POST /v1development/profiles "), "{}", request.head);
    let message = ProfilesData::decode(&request.body[..]).unwrap();
    assert_eq!(message.resource_profiles.len(), testing::small().processes.len());
    assert!(message.dictionary.unwrap().stack_table.len() > 1);
}

#[test]
fn pyroscope_gets_multipart_or_json() {
    let (listener, address) = listener();
    let received = receiver(listener, &[]);
    for scheme in ["pyroscope", "pyroscope-push"] {
        let destination = Destination::parse(&format!("{scheme}://{address}")).unwrap();
        let batch = batches(&destination, &testing::small()).unwrap();
        assert_eq!(Wire::open(&destination).unwrap().send(&destination, &batch), Outcome::Delivered);
    }
    let received = received.lock().unwrap();
    assert!(received[0].head.starts_with("POST /ingest?name=heapbpf"), "{}", received[0].head);
    let gzip = received[0].body.windows(4).any(|bytes| bytes == [0x1f, 0x8b, 8, 0]);
    assert!(gzip, "the pprof is a part of the body");
    assert!(received[1].head.starts_with("POST /push.v1.PusherService/Push "));
    let json: serde_json::Value = serde_json::from_slice(&received[1].body).unwrap();
    let raw = json["series"][0]["samples"][0]["rawProfile"].as_str().unwrap();
    use base64::Engine as _;
    let pprof = base64::engine::general_purpose::STANDARD.decode(raw).unwrap();
    assert_eq!(pprof[..3], [0x1f, 0x8b, 8]);
}

#[test]
fn otlp_over_grpc_arrives_at_a_collector_that_was_busy() {
    let (listener, address) = listener();
    let part = ExportProfilesPartialSuccess { rejected_profiles: 2, error_message: "too old".into() };
    let partly = ExportProfilesServiceResponse { partial_success: Some(part) }.encode_to_vec();
    let answers = [Err((14, "later")), Err((14, "later")), Ok(vec![]), Ok(vec![]), Err((3, "not%20so")), Ok(partly)];
    let answers = Mutex::new(answers.into_iter());
    let received: Arc<Mutex<Vec<ProfilesData>>> = Arc::default();
    let taken = Arc::clone(&received);
    heapbpf_testing::grpc::serve(listener, grpc::METHOD, move |message| {
        let answer = answers.lock().unwrap().next().unwrap();
        answer.inspect(|_| taken.lock().unwrap().push(ProfilesData::decode(message).unwrap()))
    });
    let destination = Destination::parse(&format!("otlp+grpc://{address}")).unwrap();
    let batch = batches(&destination, &testing::small()).unwrap();
    let queue = Queue::in_memory();
    (0..2).for_each(|_| assert_eq!(queue.push(&batch), None));
    deliver(&destination, &queue);
    let counts = queue.counts();
    assert_eq!((counts.delivered, counts.failures, counts.rejected), (2, 2, 0));
    let received = received.lock().unwrap().clone();
    assert_eq!(received.len(), 2);
    assert_eq!(received[0].resource_profiles.len(), testing::small().processes.len());
    let mut wire = Wire::open(&destination).unwrap();
    for refused in ["not so (gRPC status 3)", "2 of its parts: too old"] {
        assert_eq!(wire.send(&destination, &batch), Outcome::Rejected(refused.into()));
    }
}

#[test]
fn waits_double_up_to_a_minute() {
    let mut step = FIRST_WAIT;
    let waits: Vec<f64> = (0..10).map(|_| next_wait(&mut step, 1.0).as_secs_f64()).collect();
    assert_eq!(waits, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]);
    assert_eq!(next_wait(&mut step, 0.0).as_secs_f64(), 30.0);
}
