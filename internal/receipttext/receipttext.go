// Package receipttext has the text form of a receipt of a request's take.
package receipttext

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Receipt is the content of the text. The text contains it as JSON.
type Receipt struct {
	Limiter string       `json:"limiter"`
	Durable bool         `json:"durable,omitempty"`
	Policy  string       `json:"policy"`
	Key     string       `json:"key"`
	Units   int64        `json:"units"`
	Parts   []model.Take `json:"parts"`
}

// Parse reads what String wrote. It returns false if the text was cut off or changed. Anybody can write a receipt, so
// its content may still be invalid.
func Parse(text string) (r Receipt, ok bool) {
	content, ok := Open(text)
	return r, ok && json.Unmarshal(content, &r) == nil
}

func (r Receipt) String() string {
	content, _ := json.Marshal(r) // cannot fail for these types
	return Seal(content)
}

const checksumLen = 8 // bytes before the JSON; they show that a receipt was cut off or changed

// Seal returns the text for a receipt's JSON.
func Seal(content []byte) string {
	return base64.RawURLEncoding.EncodeToString(append(checksum(content), content...))
}

// Open returns the JSON in a text, and whether the text is unchanged since Seal.
func Open(text string) (content []byte, ok bool) {
	content, err := base64.RawURLEncoding.DecodeString(text)
	sum := content[:min(checksumLen, len(content))]
	content = content[len(sum):]
	return content, err == nil && bytes.Equal(checksum(content), sum)
}

func checksum(content []byte) []byte {
	sum := sha256.Sum256(content)
	return sum[:checksumLen]
}
