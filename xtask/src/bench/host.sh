# DIR SECONDS: PostgreSQL, nginx, redis and git at full load in a directory. Says READY when all of them work, and ends by
# itself.
set -u
dir=$1 end=$(($(date +%s) + $2))
cd "$dir" && chmod 755 . && mkdir -p pg www
end_all() {
  trap '' TERM
  trap - EXIT
  # A database is in a session of its own.
  kill -INT "$(head -n 1 "$dir/pg/postmaster.pid")"
  kill 0
  wait
} 2>/dev/null
trap end_all EXIT
trap exit TERM
as_nobody() { runuser -u nobody -- env HOME="$dir" "$@"; }
bin=$(ls -d /usr/lib/postgresql/*/bin | tail -1)
chown nobody pg
as_nobody "$bin/initdb" -D "$dir/pg" >initdb.log 2>&1 || exit 1
printf "unix_socket_directories='%s/pg'\nlisten_addresses=''\nfsync=off\n" "$dir" >>pg/postgresql.conf
as_nobody "$bin/postgres" -D "$dir/pg" >pg.log 2>&1 &
cat >nginx.conf <<EOF
daemon off; pid $dir/nginx.pid; error_log $dir/nginx.log; worker_processes 2; user root;
events {}
http {
  access_log off; gzip on; gzip_types *; client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  server { listen 127.0.0.1:18099; root $dir/www; location = /status { stub_status; } }
}
EOF
seq 1 20000 >www/numbers.txt
nginx -c "$dir/nginx.conf" -p "$dir" 2>/dev/null &
redis-server --port 0 --unixsocket "$dir/redis" --save '' --appendonly no >/dev/null &
git clone -q --no-hardlinks "$3" repository || exit 1
until as_nobody "$bin/pg_isready" -q -h "$dir/pg"; do sleep 0.2; done
as_nobody "$bin/createdb" -h "$dir/pg" bench && as_nobody "$bin/pgbench" -h "$dir/pg" -i -s 3 -q bench >pgbench.log 2>&1
is_time() { [ "$(date +%s)" -lt "$end" ]; }
while is_time; do as_nobody "$bin/pgbench" -h "$dir/pg" -c 4 -j 2 -T 60 bench; done >pgbench.log 2>&1 &
while is_time; do ab -q -n 1000000 -t 60 -c 8 -k -H 'Accept-Encoding: gzip' http://127.0.0.1:18099/numbers.txt; done >ab.log 2>&1 &
while is_time; do redis-benchmark -q -s "$dir/redis" -c 8 -P 4 -n 200000 -t set,get,lpush; done >redis.log 2>&1 &
(
  cd repository || exit 1
  while is_time; do
    git log --stat -n 400 >/dev/null
    git repack -q -a -d -f
    git grep -c malloc >/dev/null
    git status >/dev/null
  done
) &
echo READY
while is_time; do sleep 1; done
