-- A customer places at most 10 orders in any hour, whichever program inserts them. Run pgratelimit migrate up before.

CREATE TABLE orders (
    id       bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    customer text NOT NULL,
    item     text NOT NULL
);

-- The trigger runs with the rights of whoever inserts, who needs EXECUTE on rate_limit_allow:
--   GRANT EXECUTE ON FUNCTION rate_limit_allow TO shop;
--
-- An INSERT that is refused, or a transaction that rolls back, takes nothing. From the INSERT until the transaction
-- ends, other orders of the same customer wait. Transactions that insert for several customers can deadlock, unless
-- they all do so in the same order of customers.
CREATE FUNCTION limit_orders()
RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    answer record;
BEGIN
    SELECT * INTO answer FROM rate_limit_allow('orders', NEW.customer, 'log 10/1h', durable => true);
    IF NOT answer.allowed THEN
        RAISE EXCEPTION 'too many orders'
            USING ERRCODE = 'RL001', HINT = format('Order again in %s.', answer.retry_after);
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER limit_orders BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION limit_orders();
