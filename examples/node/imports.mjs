// At most five imports of a tenant run at once, in all processes. This one takes a minute:
//
//	npm install pg@8
//	DATABASE_URL=postgres://localhost/app node imports.mjs tenant:7 60
import { setTimeout as sleep } from 'node:timers/promises';
import pg from 'pg';

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL });
const ttl = 30_000; // in milliseconds

// withSlot waits for one of five slots of a tenant, and renews it while work runs. If the slot is lost, the signal that
// work gets is aborted.
async function withSlot(tenant, work) {
  const lost = new AbortController();
  const abort = () => lost.abort(new Error('the slot is lost'));
  let deadline;
  const ask = async (sql, ...values) => {
    const sent = performance.now();
    const { rows: [slot] } = await pool.query(sql, [...values, `${ttl} ms`]);
    if (slot.allowed) { // stop before the slot ends, also if nobody answers any more
      clearTimeout(deadline);
      deadline = setTimeout(abort, sent + 0.9 * ttl - performance.now());
    }
    return slot;
  };
  let { allowed, slot } = await ask(
    'SELECT * FROM rate_limit_acquire($1, $2, $3, ttl => $4, wait => true)', 'imports', tenant, 'concurrent 5',
  );
  const renew = () => ask('SELECT allowed, ends_at FROM rate_limit_renew($1, $2)', slot);
  let timer;
  try {
    while (!allowed) { // it is in line
      await sleep(1000);
      const place = await renew();
      if (!place.ends_at) throw new Error('the place in the line is lost');
      allowed = place.allowed;
    }
    timer = setInterval(() => renew().then((held) => { if (!held.allowed) abort(); }, console.error), ttl / 3);
    return await work(lost.signal);
  } finally {
    clearInterval(timer);
    clearTimeout(deadline);
    await pool.query('SELECT rate_limit_release($1)', [slot]);
  }
}

const [tenant, seconds] = process.argv.slice(2);
try {
  await withSlot(tenant, async (signal) => {
    await sleep(seconds * 1000, null, { signal }); // a long import
    console.log('imported');
  });
} finally {
  await pool.end();
}
