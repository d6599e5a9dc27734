// Counts the tokens of a language model, which are known only when its answer ends.
//
//	npm install pg@8
//	DATABASE_URL=postgres://localhost/app node tokens.mjs
import pg from 'pg';

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL });

// withTokens sets an estimate of a tenant's tokens aside while work runs. Then the tokens that work has used count.
async function withTokens(tenant, estimate, work) {
  const { rows: [limit] } = await pool.query(
    'SELECT allowed, hold, retry_after_seconds FROM rate_limit_hold($1, $2, $3, $4, $5)',
    ['tokens', tenant, 'fixed 100000/1d', estimate, '2 minutes'],
  );
  if (!limit.allowed) {
    throw new Error(`too few tokens are left, try again in ${limit.retry_after_seconds} s`);
  }
  let used = 0;
  try {
    return await work((tokens) => { used += tokens; });
  } finally {
    await pool.query('SELECT rate_limit_settle($1, $2)', [limit.hold, used]); // can be repeated if it fails
  }
}

try {
  console.log(await withTokens('acme', 4000, async (count) => {
    count(2719); // the model says how many it has used
    return 'the answer of a model';
  }));
} finally {
  await pool.end();
}
