-- A customer can place at most 10 orders in any hour, with any program that inserts orders. Run pgratelimit migrate up
-- first.

CREATE TABLE orders (
    id       bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    customer text NOT NULL,
    item     text NOT NULL
);

-- The trigger runs with the rights of the role that inserts, so this role needs EXECUTE on the function: GRANT EXECUTE
-- ON FUNCTION rate_limit_allow TO shop;
--
-- A refused INSERT or a rolled-back transaction takes nothing. Other orders of the same customer wait until the
-- transaction of the INSERT ends. Transactions that insert for several customers must all use the same order of
-- customers, because they could deadlock otherwise.
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
